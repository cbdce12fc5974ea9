"""A recorded side: blocks run on what another program had at their boundaries; faults are named from files alone."""

import copy
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import netkin as nk
from netkin.errors import InvalidValue, ShapeError
from recording_worlds import Language, as_vllm, boundaries, language, token_batches

BLOCKS = [f"blocks.{place}" for place in range(4)]


def diff(a, b, data=None, **options):
    return nk.diff(a, b, data, progress=False, **options)


def relative(found, wanted):
    return (torch.linalg.norm(found.double() - wanted.double()) / torch.linalg.norm(wanted.double())).item()


def scaled_weights(model):
    model.blocks[2].down.weight.mul_(1.05)


def no_norm(model):
    model.blocks[1].norm = torch.nn.Identity()


def other_activation(model):
    model.blocks[3].act = torch.nn.ReLU()


def scale_of_mixing(model):
    model.blocks[0].scale = 1.2


def other_block(model):
    model.blocks[2].load_state_dict(model.blocks[1].state_dict())


def bias_dropped(model):
    model.blocks[1].value.bias.zero_()


def last_token_repeated(model):
    block = model.blocks[3]
    forward = type(block).forward

    def broken(hidden, mask):
        output = forward(block, hidden, mask)
        return torch.cat([output[:, :1], output[:, :1], output[:, 2:]], 1)

    block.forward = broken


FAULTS = {
    scaled_weights: 2, no_norm: 1, other_activation: 3, scale_of_mixing: 0, other_block: 2, bias_dropped: 1,
    last_token_repeated: 3,
}  # fmt: skip


def recorded(model, data, folder, precision="float32"):
    return nk.recorded(as_vllm(model.to(getattr(torch, precision)), data, folder))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_block_of_a_fault_is_named_from_recorded_states_alone(tmp_path, fault, precision):
    other = language()
    with torch.no_grad():
        fault(other)
    found = diff(language(), recorded(other, token_batches(1), tmp_path / "v", precision))
    assert found.first == f"blocks.{FAULTS[fault]}"
    assert found.standing_out == (found.first,)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("padded", ["left", "right", None])
def test_clean_recordings_raise_no_alarm(tmp_path, precision, padded):
    data = token_batches(1, padded=padded)
    found = diff(language(), recorded(language(), data, tmp_path / "v", precision), data)
    assert found.first is None
    assert found.standing_out == ()
    ends = [found[name].end_to_end for name in BLOCKS]
    assert (max(ends) > 0) == (precision != "float32")


def test_another_order_of_sums_is_no_fault(tmp_path):
    other = language()
    for block in other.blocks:
        for name in ("up", "down", "value"):
            layer = getattr(block, name)
            layer.forward = lambda x, layer=layer: (
                (x[..., ::2] @ layer.weight[:, ::2].T + x[..., 1::2] @ layer.weight[:, 1::2].T) + layer.bias
            )
    found = diff(language(), recorded(other, token_batches(1), tmp_path / "v"))
    assert found.first is None
    assert max(one.local for one in found.modules.values()) > 0


def test_errors_and_floors_are_those_of_a_slow_transcription(tmp_path):
    model, other, data = language(), language(), token_batches(1)
    scaled_weights(other.requires_grad_(False))
    found = diff(model, recorded(other, data, tmp_path / "v", "bfloat16"))
    states = boundaries(other, data[0])
    mask, valid = data[0]["attention_mask"], data[0]["attention_mask"].bool()
    for place, block in enumerate(model.blocks):
        with torch.no_grad():
            own = block(states[place].float(), mask)[valid]
            cast = copy.deepcopy(block).bfloat16()(states[place], mask)[valid]
            above = copy.deepcopy(block).double()(states[place].double(), mask)[valid]
        one = found[f"blocks.{place}"]
        assert one.local == pytest.approx(relative(states[place + 1][valid], own), rel=1e-4)
        floor = math.sqrt(relative(cast, own) ** 2 + relative(above, own) ** 2 + (0.2 * 2**-7) ** 2)
        assert one.floor == pytest.approx(floor, rel=1e-3)


def test_the_predictions_are_those_that_the_model_makes_of_the_last_states(tmp_path):
    model, other, data = language(), language(), token_batches(2)
    scaled_weights(other.requires_grad_(False))
    found = diff(model, recorded(other, data, tmp_path / "v"), data)
    divergence = 0.0
    for batch in data:
        with torch.no_grad():
            first, second = model(**batch), model.head(model.norm(boundaries(other, batch)[-1]))
        logs = [logits.double().log_softmax(-1)[batch["attention_mask"].bool()] for logits in (first, second)]
        divergence += (logs[0].exp() * (logs[0] - logs[1])).sum().item()
    predictions = sum(int(batch["attention_mask"].sum()) for batch in data)
    assert found.outputs.predictions == predictions
    assert found.outputs.kl == pytest.approx(divergence / predictions, rel=1e-4)


def test_what_activations_saved_is_a_recorded_side(tmp_path):
    other, data = language(), token_batches(1, padded=None)
    scaled_weights(other.requires_grad_(False))
    saved = nk.activations(
        other.bfloat16(), ["embed", "blocks.*", "norm", "head"], data, shape="tokens", save=tmp_path / "s",
        progress=False,
    )  # fmt: skip
    found = diff(language(), saved, data)
    assert list(found.modules) == ["embed", *BLOCKS, "norm", "head"]
    assert (found.first, found.precision) == ("blocks.2", ("float32", "bfloat16"))
    renamed = Language()
    renamed.load_state_dict(language().state_dict())
    renamed.layers, renamed.blocks = renamed.blocks, None
    renamed.forward = lambda input_ids, attention_mask: renamed.head(
        renamed.norm(
            renamed.layers[3](
                renamed.layers[2](
                    renamed.layers[1](renamed.layers[0](renamed.embed(input_ids), attention_mask), attention_mask),
                    attention_mask,
                ),
                attention_mask,
            )
        )
    )
    assert diff(renamed.eval(), saved, data, match={"layers": "blocks"}).first == "layers.2"


def test_states_that_were_raised_to_float32_in_the_files_count_as_halves(tmp_path):
    data = token_batches(1, padded=None)
    states = boundaries(language().bfloat16(), data[0])
    arrays = {f"blocks.{place}": state.float() for place, state in enumerate(states[1:])}
    save_file(arrays | {"ids": torch.arange(8)}, tmp_path / "a.safetensors")
    found = diff(language(), str(tmp_path / "a.safetensors"), data)
    assert (found.first, found.precision[1]) == (None, "bfloat16")


def test_few_recorded_boundaries_stand_for_all_blocks_between_them(tmp_path):
    other, data = language(), token_batches(1)
    scaled_weights(other.requires_grad_(False))
    found = diff(language(), f"{as_vllm(other, data, tmp_path / 'v', columns=[1, 3, 4])},layers=1+3+4")
    assert (list(found.modules), found.first) == (["blocks.0", "blocks.2", "blocks.3"], "blocks.2")
    assert [caveat.code for caveat in found.caveats] == ["not-recorded"]


def test_other_weights_throughout_are_said_to_be_everywhere(tmp_path):
    found = diff(language(0), recorded(language(1), token_batches(1), tmp_path / "v"))
    assert [caveat.code for caveat in found.caveats] == ["everywhere"]
    assert "4 of 4 blocks stand out" in str(found.caveats[0])
    clean = diff(language(0), recorded(language(0), token_batches(1), tmp_path / "w"))
    assert clean.caveats == ()


def test_the_result_is_saved_and_printed_and_reported(tmp_path):
    other = language()
    scaled_weights(other.requires_grad_(False))
    found = diff(language(), recorded(other, token_batches(1), tmp_path / "v"))
    found.save(tmp_path / "found.netkin")
    again = nk.load(tmp_path / "found.netkin")
    assert (again.first, again.way, str(again)) == (found.first, "recorded", str(found))
    assert "outputs that a makes of b's last states" in str(found)
    nk.report(found, tmp_path / "found.html")
    assert "input of blocks.0" in (tmp_path / "found.html").read_text()


def test_the_model_is_as_it_was(tmp_path):
    model = language()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    diff(model, recorded(language(), token_batches(1), tmp_path / "v", "bfloat16"))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- refusals ---------------------------------------------------------------------------------------------------------


def in_halves_against_float32(folder):
    return language().bfloat16(), recorded(language(), token_batches(1), folder / "v"), None


def unnumbered_columns(folder):
    return language(), str(as_vllm(language(), token_batches(1), folder / "v", columns=[1, 2])), None


def a_deeper_recording(folder):
    return language(), f"{as_vllm(language(), token_batches(1), folder / 'v', columns=[1, 2])},layers=3+9", None


def pooled_rows(folder):
    data = token_batches(1)
    return language(), nk.activations(language(), BLOCKS, data, save=folder / "r", progress=False), data


def no_layer_in_common(folder):
    np.savez(folder / "a.npz", x=np.ones((8, 11, 16), np.float32), ids=np.arange(8))
    return language(), str(folder / "a.npz"), token_batches(1)


def unknown_examples(folder):
    np.savez(folder / "a.npz", **{"blocks.0": np.ones((8, 11, 16), np.float32)})
    return language(), str(folder / "a.npz"), token_batches(1)


def another_width(folder):
    np.savez(folder / "a.npz", **{"blocks.0": np.ones((8, 11, 12), np.float32)}, ids=np.arange(8))
    return language(), str(folder / "a.npz"), token_batches(1, padded=None)


def no_data_and_no_tokens(folder):
    np.savez(folder / "a.npz", **{"blocks.0": np.ones((8, 11, 16), np.float32)}, ids=np.arange(8))
    return language(), str(folder / "a.npz"), None


REFUSED = [
    (in_halves_against_float32, InvalidValue, "a"),
    (unnumbered_columns, InvalidValue, "b"),
    (a_deeper_recording, InvalidValue, "b"),
    (pooled_rows, ShapeError, "b"),
    (no_layer_in_common, InvalidValue, "match"),
    (unknown_examples, InvalidValue, "b"),
    (another_width, ShapeError, "b"),
    (no_data_and_no_tokens, InvalidValue, "data"),
]


@pytest.mark.parametrize("sides, error, argument", REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_what_can_not_be_held_against_the_model_is_refused(tmp_path, sides, error, argument):
    a, b, data = sides(tmp_path)
    with pytest.raises(error) as refused:
        diff(a, b, data)
    assert refused.value.argument == argument
