// Search from a folder: browsers start no worker for a page at file://, so its script runs in a hidden frame instead.
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const inner = (this.inner = frame.contentWindow);
    const load = (source) => new Promise((done, failed) => inner.document.body.append(Object.assign(
      inner.document.createElement("script"), { src: source, onload: done, onerror: failed })));
    inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    inner.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
    this.ready = load(String(url));
  }
  postMessage(data) { this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data }))); }
  terminate() { this.inner.frameElement.remove(); }
};
