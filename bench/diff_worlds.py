# ruff: noqa: E501  tables with a fault in each line
"""Worlds for `bench/diff.py`: small networks, faults planted in them, and changes that only round differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, LENGTH, BATCH = 128, 32, 4
Fault = Callable[[nn.Module], None]


# --- networks ---------------------------------------------------------------------------------------------------------


def lively(model: nn.Module) -> nn.Module:
    """Return a model whose weights are large enough that it is not nearly linear, with biases that are not zero."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.mul_(3)
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def llama(attention: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=4, attn_implementation=attention, **sizes)
    return lively(LlamaForCausalLM(config))


def mixtral(attention: str = "eager") -> nn.Module:
    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 3, "num_local_experts": 4}
    sizes |= {"experts_implementation": "eager"}  # the grouped product has no float64
    config = MixtralConfig(vocab_size=VOCABULARY, attn_implementation=attention, **sizes)
    return lively(MixtralForCausalLM(config))


def gpt2(attention: str = "eager") -> nn.Module:
    torch.manual_seed(1)
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    return lively(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, attn_implementation=attention, **sizes)))


def bert(attention: str = "eager") -> nn.Module:
    torch.manual_seed(2)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    return lively(BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, attn_implementation=attention, **sizes)))


def vit(attention: str = "eager") -> nn.Module:
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(image_size=32, patch_size=8, num_labels=10, attn_implementation=attention, **sizes)
    return lively(ViTForImageClassification(config))


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(inner + x)


class ConvNet(nn.Module):
    """A small residual network."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, width, 3, padding=1), nn.MaxPool2d(2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def convnet(attention: str = "eager") -> nn.Module:
    torch.manual_seed(4)
    model = ConvNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def trained(attention: str = "eager", _kept: dict[str, Any] = {}) -> nn.Module:  # noqa: B006  trained once
    """Return a language model trained on the pages of this repository; a few channels are 4 × the median one."""
    if not _kept:
        model, text = gpt2(), "".join(page.read_text() for page in sorted(Path("docs").glob("*.md")))
        codes = torch.tensor(list(text.encode("ascii", "replace")))
        with torch.no_grad():  # a large gain at first lets training keep these channels large
            model.transformer.wte.weight[:, [5, 40]] += 2.0
        optimiser, drawn = torch.optim.AdamW(model.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
        for _ in range(300):
            starts = torch.randint(0, len(codes) - LENGTH, (16,), generator=drawn)
            ids = torch.stack([codes[start : start + LENGTH] for start in starts.tolist()])
            optimiser.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
        _kept.update(model.eval().state_dict())
    model = gpt2(attention)
    model.load_state_dict(_kept)
    return model


def outliers(attention: str = "eager", _kept: dict[str, Any] = {}) -> nn.Module:  # noqa: B006  trained once
    """Return a language model that was trained on text of Python's library, in a basis with outlier channels.

    Trained at a large rate by Adam without weight decay, in two ways, its largest channels stayed at 2 to 5 times the
    median one. So they are made: the weights of the norms are moved into the linear layers that follow, and the
    residual stream is turned into its principal axes, which changes no output but for rounding. `python
    bench/diff_worlds.py` prints how large the channels are.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=4, attn_implementation=attention, **sizes)
    if not _kept:
        torch.manual_seed(5)
        model, codes = LlamaForCausalLM(config), text_of_python()
        optimiser, drawn = torch.optim.Adam(model.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
        for step in range(400):
            optimiser.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 50)
            ids = windows(codes, 16, drawn)
            optimiser.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
        turn_to_principal_axes(model.eval(), windows(codes, 32, drawn))
        _kept.update(model.state_dict())
    model = LlamaForCausalLM(config)
    model.load_state_dict(_kept)
    return model.eval()


def text_of_python() -> Tensor:
    """Return the codes of the help texts of Python, which every installation has."""
    text = "".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "replace")))


def windows(codes: Tensor, count: int, drawn: torch.Generator) -> Tensor:
    """Return stretches of text, each after the same first token."""
    starts = torch.randint(0, len(codes) - LENGTH, (count, 1), generator=drawn)
    return torch.cat([torch.zeros(count, 1, dtype=torch.long), codes[starts + torch.arange(LENGTH - 1)]], 1)


@torch.no_grad()
def turn_to_principal_axes(model: nn.Module, ids: Tensor) -> None:
    """Turn the residual stream of a Llama into its principal axes, with the same predictions."""
    blocks, head = model.model.layers, model.lm_head
    readers = [
        (block.input_layernorm, (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj))
        for block in blocks
    ]
    readers += [(block.post_attention_layernorm, (block.mlp.gate_proj, block.mlp.up_proj)) for block in blocks]
    readers += [(model.model.norm, (head,))]
    for norm, linears in readers:
        for linear in linears:
            linear.weight *= norm.weight
        norm.weight.fill_(1.0)
    streams = model(input_ids=ids, output_hidden_states=True).hidden_states[1:-1]
    rows = torch.cat([(stream / stream.square().mean().sqrt()).flatten(0, 1) for stream in streams]).double()
    axes = torch.linalg.eigh(rows.T @ rows)[1].float()
    for linear in [model.model.embed_tokens] + [linear for _, linears in readers for linear in linears]:
        linear.weight.copy_(linear.weight @ axes)
    for block in blocks:
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            linear.weight.copy_(axes.T @ linear.weight)


@torch.no_grad()
def largest_channels(model: nn.Module, ids: Tensor) -> list[tuple[float, float]]:
    """Return, after each block, the largest channel over the median one, and the largest value over the median one."""
    streams = model(input_ids=ids, output_hidden_states=True).hidden_states[1:-1]
    sizes = [stream.square().mean((0, 1)).sqrt() for stream in streams]
    return [
        (float(size.max() / size.median()), float(stream.abs().max() / stream.abs().median()))
        for size, stream in zip(sizes, streams, strict=True)
    ]


NETS = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "convnet": convnet,
    "trained": trained,
    "outliers": outliers,
    "mixtral": mixtral,
}


def data_of(net: str, padded: str = "") -> list[Any]:
    """Return one batch for a network: tokens with a mask, or images."""
    drawn = torch.Generator().manual_seed(7)
    if net == "outliers" and not padded:
        ids = windows(text_of_python(), BATCH, drawn)
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    if net == "convnet":
        return [torch.randn(BATCH, 3, 16, 16, generator=drawn)]
    if net == "vit":
        return [{"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=drawn)}]
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=drawn)
    mask = torch.ones_like(ids)
    for place in range(BATCH):
        if padded == "left":
            mask[place, : 3 * place] = 0
        if padded == "right":
            mask[place, LENGTH - 3 * place :] = 0
    return [{"input_ids": ids, "attention_mask": mask}]


# --- faults -----------------------------------------------------------------------------------------------------------


def at(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


def around(name: str, wrapped: Callable[..., Any]) -> Fault:
    """Return a fault in the code of a module: ``wrapped(forward, *args, **kwargs)`` takes the place of its forward."""

    def plant(model: nn.Module) -> None:
        module = at(model, name)
        forward = type(module).forward
        module.forward = lambda *args, **kwargs: wrapped(lambda *a, **k: forward(module, *a, **k), *args, **kwargs)

    return plant


def first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's output with its first tensor changed."""
    return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])


def changed(name: str, weight: str, change: Callable[[Tensor], Tensor | None]) -> Fault:
    """Return a fault in a weight or buffer; `change` works in place, or returns another tensor."""

    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            tensor = getattr(at(model, name), weight)
            new = change(tensor)
            if isinstance(new, Tensor):
                tensor.copy_(new)

    return plant


def attribute(name: str, key: str, value: Any) -> Fault:
    return lambda model: setattr(
        at(model, name),
        key,
        value(getattr(at(model, name), key)) if callable(value) and not isinstance(value, nn.Module) else value,
    )


def swapped(name: str, one: str, other: str, weight: str = "weight") -> Fault:
    def plant(model: nn.Module) -> None:
        module = at(model, name)
        with torch.no_grad():
            first, second = (getattr(at(module, part), weight) for part in (one, other))
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)

    return plant


def loaded_from(name: str, other: str) -> Fault:
    return lambda model: at(model, name).load_state_dict(at(model, other).state_dict())


def rows_of_heads_transposed(weight: Tensor, heads: int = 4) -> Tensor:
    return weight.reshape(heads, -1, weight.shape[-1]).transpose(0, 1).reshape(weight.shape)


def with_kwarg(key: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def wrapped(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **(kwargs | {key: change(kwargs.get(key))}))

    return wrapped


def shifted_mask(mask: Tensor | None) -> Tensor | None:
    """Let every token see the one after it."""
    if mask is None:
        return None
    return torch.cat([mask[..., 1:, :], mask[..., -1:, :]], dim=-2)


def in_half(forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute with inputs rounded to bfloat16."""
    return forward(hidden.bfloat16().to(hidden.dtype), *args, **kwargs)


class Replaced(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def zero_rows(weight: Tensor) -> None:
    weight[: len(weight) // 2] = 0


def two_rows(weight: Tensor) -> None:
    weight[[3, 17]] = weight[[17, 3]]


def one_row(weight: Tensor) -> None:
    weight[int(data_of("llama")[0]["input_ids"][0, 0])] *= 1.05


def one_position(weight: Tensor) -> None:
    weight[7] *= 1.1


def one_channel(weight: Tensor) -> None:
    weight[5] = 0


LLAMA: Mapping[str, tuple[str, Fault]] = {
    "eps of a norm": ("model.layers.2.input_layernorm", attribute("model.layers.2.input_layernorm", "variance_epsilon", 1e-1)),
    "norm without its weight": ("model.layers.1.post_attention_layernorm", changed("model.layers.1.post_attention_layernorm", "weight", lambda w: torch.ones_like(w))),
    "residual missing": ("model.layers.2", around("model.layers.2", lambda forward, hidden, *a, **k: first(forward(hidden, *a, **k), lambda out: out - hidden))),
    "residual halved": ("model.layers.1", around("model.layers.1", lambda forward, hidden, *a, **k: first(forward(hidden, *a, **k), lambda out: out - 0.5 * hidden))),
    "heads of q split the other way": ("model.layers.3.self_attn.q_proj", changed("model.layers.3.self_attn.q_proj", "weight", rows_of_heads_transposed)),
    "heads of v split the other way": ("model.layers.0.self_attn.v_proj", changed("model.layers.0.self_attn.v_proj", "weight", lambda w: rows_of_heads_transposed(w, 2))),
    "base of the rotary embedding": ("model.rotary_emb", changed("model.rotary_emb", "inv_freq", lambda f: f**1.1)),
    "rotary frequencies rounded": ("model.rotary_emb", changed("model.rotary_emb", "inv_freq", lambda f: f.bfloat16().to(f.dtype))),
    "mask shifted by one": ("model.layers.2.self_attn", around("model.layers.2.self_attn", with_kwarg("attention_mask", shifted_mask))),
    "window of attention": ("model.layers.1.self_attn", around("model.layers.1.self_attn", with_kwarg("attention_mask", lambda m: m if m is None else m + torch.triu(torch.ones(LENGTH, LENGTH), 1).T.tril(-12).to(m.dtype) * -1e9))),
    "scale of attention": ("model.layers.2.self_attn", attribute("model.layers.2.self_attn", "scaling", lambda s: s * 1.1)),
    "attention not scaled": ("model.layers.0.self_attn", attribute("model.layers.0.self_attn", "scaling", 1.0)),
    "gate and up swapped": ("model.layers.1.mlp.gate_proj model.layers.1.mlp.up_proj", swapped("model.layers.1.mlp", "gate_proj", "up_proj")),
    "another activation": ("model.layers.2.mlp.act_fn", lambda model: setattr(at(model, "model.layers.2.mlp"), "act_fn", nn.GELU())),
    "a channel zeroed": ("model.layers.3.mlp.down_proj", changed("model.layers.3.mlp.down_proj", "weight", one_channel)),
    "half of a weight not loaded": ("model.layers.0.self_attn.o_proj", changed("model.layers.0.self_attn.o_proj", "weight", zero_rows)),
    "weights of the layer before": ("model.layers.2.mlp.down_proj", loaded_from("model.layers.2.mlp.down_proj", "model.layers.1.mlp.down_proj")),
    "rows of the vocabulary swapped": ("model.embed_tokens", changed("model.embed_tokens", "weight", two_rows)),
    "one token's embedding": ("model.embed_tokens", changed("model.embed_tokens", "weight", one_row)),
    "last position dropped": ("model.layers.1", around("model.layers.1", lambda forward, *a, **k: first(forward(*a, **k), lambda out: torch.cat([out[:, :-1], out[:, :1]], 1)))),
    "logits scaled": ("lm_head", around("lm_head", lambda forward, *a: forward(*a) * 1.05)),
    "inputs rounded to half": ("model.layers.2.mlp", around("model.layers.2.mlp", in_half)),
    "norms exchanged": ("model.layers.1.input_layernorm model.layers.1.post_attention_layernorm", swapped("model.layers.1", "input_layernorm", "post_attention_layernorm")),
    "values clipped": ("model.layers.3", around("model.layers.3", lambda forward, *a, **k: first(forward(*a, **k), lambda out: out.clamp(-1.5, 1.5)))),
}  # fmt: skip
GPT2: Mapping[str, tuple[str, Fault]] = {
    "eps of a norm": ("transformer.h.1.ln_1", attribute("transformer.h.1.ln_1", "eps", 1e-1)),
    "bias dropped": ("transformer.h.2.mlp.c_fc", changed("transformer.h.2.mlp.c_fc", "bias", lambda b: b.zero_())),
    "bias of the projection dropped": ("transformer.h.0.attn.c_proj", changed("transformer.h.0.attn.c_proj", "bias", lambda b: b.zero_())),
    "another GELU in all layers": ("transformer.h.0.mlp.act", lambda model: [setattr(block.mlp, "act", nn.GELU()) for block in model.transformer.h]),
    "another GELU in one layer": ("transformer.h.3.mlp.act", lambda model: setattr(model.transformer.h[3].mlp, "act", nn.GELU())),
    "q and k swapped": ("transformer.h.1.attn.c_attn", changed("transformer.h.1.attn.c_attn", "weight", lambda w: torch.cat([w[:, 64:128], w[:, :64], w[:, 128:]], 1))),
    "weight transposed": ("transformer.h.2.attn.c_proj", changed("transformer.h.2.attn.c_proj", "weight", lambda w: w.T.clone())),
    "residual missing": ("transformer.h.3", around("transformer.h.3", lambda forward, hidden, *a, **k: first(forward(hidden, *a, **k), lambda out: out - hidden))),
    "final norm without bias": ("transformer.ln_f", changed("transformer.ln_f", "bias", lambda b: b.zero_())),
    "dropout's scale left on": ("transformer.h.1.mlp.dropout", lambda model: setattr(model.transformer.h[1].mlp, "dropout", Replaced(lambda x: x / 0.9))),
    "a position's embedding": ("transformer.wpe", changed("transformer.wpe", "weight", one_position)),
    "attention in half precision": ("transformer.h.2.attn", around("transformer.h.2.attn", in_half)),
    "scores not scaled": ("transformer.h.0.attn", attribute("transformer.h.0.attn", "scaling", 1.0)),
    "norm skipped": ("transformer.h.2.ln_2", around("transformer.h.2.ln_2", lambda forward, x: x)),
    "embedding scaled": ("transformer.wte", around("transformer.wte", lambda forward, ids: forward(ids) * 8)),
    "output in the wrong order": ("transformer.h.1.attn", around("transformer.h.1.attn", lambda forward, *a, **k: first(forward(*a, **k), lambda out: out.roll(1, 1)))),
}  # fmt: skip
BERT: Mapping[str, tuple[str, Fault]] = {
    "eps of a norm": ("bert.encoder.layer.1.output.LayerNorm", attribute("bert.encoder.layer.1.output.LayerNorm", "eps", 1e-2)),
    "q and k swapped": ("bert.encoder.layer.2.attention.self.query bert.encoder.layer.2.attention.self.key", swapped("bert.encoder.layer.2.attention.self", "query", "key", "bias")),
    "another GELU": ("bert.encoder.layer.3.intermediate.intermediate_act_fn", lambda model: setattr(model.bert.encoder.layer[3].intermediate, "intermediate_act_fn", nn.GELU(approximate="tanh"))),
    "residual missing": ("bert.encoder.layer.0.output", around("bert.encoder.layer.0.output", lambda forward, hidden, before: forward(hidden, torch.zeros_like(before)))),
    "wrong type of tokens": ("bert.embeddings.token_type_embeddings", around("bert.embeddings.token_type_embeddings", lambda forward, ids: forward(torch.ones_like(ids)))),
    "positions from two": ("bert.embeddings.position_embeddings", around("bert.embeddings.position_embeddings", lambda forward, ids: forward(ids + 2))),
    "embeddings not normalised": ("bert.embeddings.LayerNorm", around("bert.embeddings.LayerNorm", lambda forward, x: x)),
    "a channel zeroed": ("bert.encoder.layer.2.intermediate.dense", changed("bert.encoder.layer.2.intermediate.dense", "weight", one_channel)),
    "head without its activation": ("cls.predictions.transform.transform_act_fn", lambda model: setattr(model.cls.predictions.transform, "transform_act_fn", nn.Identity())),
    "bias of the decoder dropped": ("cls.predictions.decoder", changed("cls.predictions.decoder", "bias", lambda b: b.zero_())),
    "value's heads transposed": ("bert.encoder.layer.1.attention.self.value", changed("bert.encoder.layer.1.attention.self.value", "weight", rows_of_heads_transposed)),
    "softmax sharper": ("bert.encoder.layer.0.attention.self", attribute("bert.encoder.layer.0.attention.self", "scaling", lambda s: s * 1.05)),
}  # fmt: skip
VIT: Mapping[str, tuple[str, Fault]] = {
    "patches transposed": ("vit.embeddings.patch_embeddings.projection", changed("vit.embeddings.patch_embeddings.projection", "weight", lambda w: w.transpose(2, 3).clone())),
    "channels in another order": ("vit.embeddings.patch_embeddings.projection", changed("vit.embeddings.patch_embeddings.projection", "weight", lambda w: w.flip(1))),
    "eps of the last norm": ("vit.layernorm", attribute("vit.layernorm", "eps", 1e-1)),
    "another GELU": ("vit.layers.2.mlp.activation_fn", lambda model: setattr(model.vit.layers[2].mlp, "activation_fn", nn.GELU(approximate="tanh"))),
    "the other token is read": ("vit", around("vit", lambda forward, *a, **k: _rolled(forward(*a, **k)))),
    "bias dropped": ("classifier", changed("classifier", "bias", lambda b: b.zero_())),
    "scale of attention": ("vit.layers.1.attention", attribute("vit.layers.1.attention", "scaling", lambda s: s * 1.2)),
    "residual missing": ("vit.layers.3", around("vit.layers.3", lambda forward, hidden, *a, **k: first(forward(hidden, *a, **k), lambda out: out - hidden))),
    "first token not normalised": ("vit.layers.0.layernorm_before", around("vit.layers.0.layernorm_before", lambda forward, x: torch.cat([x[:, :1], forward(x)[:, 1:]], 1))),
}  # fmt: skip
CONVNET: Mapping[str, tuple[str, Fault]] = {
    "padding mode": ("blocks.1.conv1", attribute("blocks.1.conv1", "padding_mode", "circular")),
    "stale running mean": ("blocks.2.norm1", changed("blocks.2.norm1", "running_mean", lambda m: m.zero_())),
    "stale running variance": ("blocks.0.norm2", changed("blocks.0.norm2", "running_var", lambda v: v.mul_(0.9))),
    "eps of a batch norm": ("blocks.1.norm2", attribute("blocks.1.norm2", "eps", 1e-2)),
    "batch norm that trains": ("blocks.0.norm1", attribute("blocks.0.norm1", "training", True)),
    "kernel flipped": ("blocks.2.conv2", changed("blocks.2.conv2", "weight", lambda w: w.flip(2, 3))),
    "bias dropped": ("stem", changed("stem", "bias", lambda b: b.zero_())),
    "average pooling": ("pool", lambda model: setattr(model, "pool", nn.AvgPool2d(2))),
    "dilated": ("blocks.0.conv2", lambda model: [setattr(model.blocks[0].conv2, "dilation", (2, 2)), setattr(model.blocks[0].conv2, "padding", (2, 2))]),
    "residual missing": ("blocks.1", around("blocks.1", lambda forward, x: forward(x) - x.relu())),
    "another activation": ("blocks.2.relu", lambda model: setattr(model.blocks[2], "relu", nn.LeakyReLU(0.1))),
    "mean over the wrong axis": ("", around("", lambda forward, x: forward(x.transpose(2, 3).roll(1, 2)))),
}  # fmt: skip


# added later, of kinds at which earlier rules had failed
MIXTRAL: Mapping[str, tuple[str, Fault]] = {
    "weights of experts not normalised": ("model.layers.1.mlp.gate", around("model.layers.1.mlp.gate", lambda forward, x: _not_normalised(forward(x)))),
    "one expert only": ("model.layers.2.mlp.gate", around("model.layers.2.mlp.gate", lambda forward, x: _one_expert(forward(x)))),
    "rows of the router in another order": ("model.layers.0.mlp.gate", changed("model.layers.0.mlp.gate", "weight", lambda w: w.roll(1, 0))),
    "experts in another order": ("model.layers.1.mlp.experts", changed("model.layers.1.mlp.experts", "down_proj", lambda w: w.roll(1, 0))),
    "an expert not loaded": ("model.layers.2.mlp.experts", changed("model.layers.2.mlp.experts", "down_proj", lambda w: w.index_fill(0, torch.tensor([2]), 0.0))),
    "gate and up of the experts swapped": ("model.layers.0.mlp.experts", changed("model.layers.0.mlp.experts", "gate_up_proj", lambda w: torch.cat([w[:, 128:], w[:, :128]], 1))),
    "one added to all norms": ("model.layers.0.input_layernorm", lambda model: [module.weight.data.add_(1) for name, module in model.named_modules() if name.endswith("norm")]),
    "no attention output in one head": ("model.layers.1.self_attn.o_proj", changed("model.layers.1.self_attn.o_proj", "weight", lambda w: w.index_fill(1, torch.arange(16, 32), 0.0))),
}  # fmt: skip


def _not_normalised(output: Any) -> Any:
    logits, _, chosen = output
    return logits, logits.float().softmax(-1).gather(-1, chosen), chosen


def _one_expert(output: Any) -> Any:
    logits, weights, chosen = output
    return logits, torch.tensor([1.0, 0.0], dtype=weights.dtype).expand_as(weights), chosen


def _rolled(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state.roll(1, 1)
    return output


FAULTS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "bert": BERT,
    "vit": VIT,
    "convnet": CONVNET,
    "trained": GPT2,
    "outliers": LLAMA,
    "mixtral": MIXTRAL,
}


# --- changes that only round differently ------------------------------------------------------------------------------


class SplitLinear(nn.Linear):
    """A linear layer whose products are summed in two parts, as tensor parallelism does."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        summed = x[..., :half] @ self.weight[:, :half].T + x[..., half:] @ self.weight[:, half:].T
        return summed if self.bias is None else summed + self.bias


def split_products(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = SplitLinear
    return model


def one_by_one(model: nn.Module) -> nn.Module:
    """Run linear layers and convolutions example by example."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            forward = type(module).forward
            module.forward = lambda x, f=forward, m=module: torch.cat([f(m, one) for one in x.split(1)])
    return model


def transposed_products(model: nn.Module) -> nn.Module:
    """Compute linear layers as the transpose of a product."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda x, m=module: (
                (m.weight @ x.transpose(-1, -2)).transpose(-1, -2) + (0 if m.bias is None else m.bias)
                if x.ndim == 3
                else type(m).forward(m, x)
            )
    return model


def norms_in_float32(model: nn.Module) -> nn.Module:
    for name, module in model.named_modules():
        if name.endswith("norm"):
            forward = type(module).forward
            module.forward = lambda x, f=forward, m=module: f(m.float(), x.float()).to(x.dtype)
    return model


def channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


class Int8Linear(nn.Module):
    """A linear layer whose weight has 8 bits, with a scale for each row."""

    def __init__(self, linear: Any, transposed: bool = False):
        super().__init__()
        weight = linear.weight.detach().float().T if transposed else linear.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        summed = x @ (self.weight.to(x.dtype) * self.scale).T
        return summed if self.bias is None else summed + self.bias


def int8(model: nn.Module) -> nn.Module:
    """Return the model with 8-bit weights in all linear layers, but for the last one."""
    for name, module in list(model.named_modules()):
        is_conv1d = type(module).__name__ == "Conv1D"
        if (is_conv1d or isinstance(module, nn.Linear)) and name not in (
            "lm_head",
            "classifier",
            "head",
            "cls.predictions.decoder",
        ):
            parent, _, key = name.rpartition(".")
            quantised = Int8Linear(module, is_conv1d)
            if "forward" in vars(module):
                quantised.forward = module.forward
            setattr(model.get_submodule(parent), key, quantised)
    return model


if __name__ == "__main__":
    for net in ("trained", "outliers"):
        print(
            net,
            [
                f"{channel:.3g}, {value:.3g}"
                for channel, value in largest_channels(NETS[net](), data_of(net)[0]["input_ids"])
            ],
        )
