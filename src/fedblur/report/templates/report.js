"use strict";
// The page is whole without this: a switch for light and dark, values under the pointer, and (live) newer figures.
const root = document.documentElement;
const button = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const kept = { get: () => { try { return localStorage.getItem("fedblur-theme"); } catch { return null; } },
  set: (theme) => { try { localStorage.setItem("fedblur-theme", theme); } catch { /* a file may have no storage */ } } };
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
const label = () => { button.textContent = isDark() ? "Light" : "Dark";
  button.setAttribute("aria-label", isDark() ? "Use the light theme" : "Use the dark theme"); };
if (kept.get()) root.dataset.theme = kept.get();
button.hidden = false;
button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; kept.set(root.dataset.theme); label(); });
dark.addEventListener("change", label);
label();

// Browsers show an SVG title after a while, and not at all on a phone: with a script it is shown at once.
const withTips = (page) => { for (const hit of page.querySelectorAll(".hit")) {
  const title = hit.querySelector("title");
  if (title) { hit.dataset.tip = title.textContent; title.remove(); } } };
withTips(document);
const tip = document.getElementById("tip");
const point = (event) => {
  const hit = event.target.closest ? event.target.closest(".hit") : null;
  tip.hidden = !hit;
  if (!hit) return;
  tip.textContent = hit.dataset.tip;
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 12) + "px";
};
for (const name of ["pointermove", "pointerdown"]) document.addEventListener(name, point);

const parts = (page) => new Map([...page.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
const swap = (now, next) => {
  const open = new Set([...now.querySelectorAll("details[open]")].map((each) => each.id));
  const scrolled = new Map([...now.querySelectorAll("details[open]")].map((each) => {
    const box = each.querySelector(".scroll"); return [each.id, box ? box.scrollTop : 0]; }));
  const focused = now.contains(document.activeElement) ? document.activeElement.closest("details") : null;
  const fresh = document.importNode(next, true);
  now.replaceWith(fresh);
  for (const each of fresh.querySelectorAll("details")) {
    each.open = open.has(each.id);
    const box = each.querySelector(".scroll");
    if (box && scrolled.has(each.id)) box.scrollTop = scrolled.get(each.id);
    if (focused && each.id === focused.id) each.querySelector("summary").focus({ preventScroll: true });
  }
};
const show = (text) => {
  const page = new DOMParser().parseFromString(text, "text/html");
  withTips(page);
  const old = parts(document), fresh = parts(page);
  document.title = page.title;
  if ([...old.keys()].join() === [...fresh.keys()].join()) {
    for (const [key, part] of fresh) {
      const now = old.get(key);
      if (now.outerHTML.replaceAll(' open=""', "") !== part.outerHTML) swap(now, part);
    }
    return;
  }
  for (const place of ["head", "state"]) swap(old.get(place), fresh.get(place));
  swap(document.querySelector("main"), page.querySelector("main"));
};
const every = Number(document.body.dataset.live || 0);
if (every) {
  let tag = "";
  const link = document.getElementById("link");
  const say = (words) => { if (link.textContent !== words) link.textContent = words; };
  const ask = async () => {
    try {
      const answer = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) { tag = answer.headers.get("ETag") || ""; show(await answer.text()); }
      say("Up to date.");
    } catch { say("fedblur watch has ended; this is the last state."); }
    setTimeout(ask, every);
  };
  setTimeout(ask, every);
}
