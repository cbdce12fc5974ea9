"""Models by name: `BUILDER[@WEIGHTS]`, `hf:DIR[,option=value]`, or the path of a `.pt2` file.

`hf:DIR` is a Hugging Face model in a folder written by `save_pretrained`; nothing is ever downloaded. Text and images
reach such a model through the tokenizer and the image processor that lie in its folder.
"""

from __future__ import annotations

import filecmp
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from netkin.errors import FileError, InvalidValue, NetkinError, SourceError, did_you_mean, import_optional
from netkin.files import read_header
from netkin.sources.architectures import ARCHITECTURES, architecture, seeded
from netkin.sources.exported_programs import load_exported
from netkin.sources.names import (
    call_named,
    content,
    find_function,
    in_short,
    near,
    read_json,
    refusing_unreadable,
    require_file,
    typed_options,
)
from netkin.sources.weights import keep_note, list_names, load_weights, mismatches, read_state, require_harmless

# who rebuilds a compressed model from its file and the original network; imported when one is asked for
COMPRESSED = ("netkin.applications.compression", "load_compressed")
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
_TOKENIZER_CONFIG = "tokenizer_config.json"
# keys that say where a tokenizer came from, which differ between copies of one
_PLACES = ("is_local", "local_files_only", "name_or_path")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_PROCESSOR = "preprocessor_config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def load_model(spec: str, seed: int = 0) -> nn.Module:
    """Return the model that `spec` names, on the CPU and in evaluation mode.

    `spec` is one of

    - `BUILDER[@WEIGHTS]`. The builder is `netkin:NAME[,option=value]`, one of our reference architectures, or
      `package.module:function`, which is called without arguments and may lie in the current directory. The weights are
      a `.safetensors` file or a state dict saved by torch, or a compressed model as `nk.save_compressed` writes it,
      for which the builder makes the original network. Without weights the model has fresh ones, drawn from `seed`, and
      results say so; torch's global random state is not changed.
    - `hf:DIR[,option=value]`, a Hugging Face model in the folder that `save_pretrained` wrote. Options are
      `dtype=float32`, `float16`, `bfloat16` or `auto` (that of its files, the default); `adapter=DIR`, an adapter that
      PEFT saved for this model as safetensors; `device_map=auto` or the name of a device, by which accelerate places
      the model, and fetches from the host or from disk, layer by layer, what does not fit; with it `memory=24GB`, the
      most that may stay in the host's memory, and `offload=DIR`, a folder for the rest.
    - the path of an exported program, which ends in `.pt2`.

    Example:
        >>> load_model("netkin:digits").fc
        Linear(in_features=64, out_features=10, bias=True)
    """
    with refusing_unreadable(spec):
        return in_evaluation(_loaded(spec, seed))


def require_known_model(spec: str) -> None:
    """Refuse a name of no model, as far as this can be seen without loading it."""
    with refusing_unreadable(spec):
        builder, _, weights = spec.partition("@")
        if is_huggingface_name(spec):
            folder, options = split_huggingface(spec)
            _config(Path(folder).expanduser())
            _adapter_of(options, folder)
        elif spec.endswith(".pt2") and ":" not in builder:
            require_file(Path(spec).expanduser())
        else:
            _require_named_weights(spec)
            _builder(builder)
            if weights:
                require_file(Path(weights).expanduser(), "weights file")


def names_weights(spec: str) -> bool:
    """Return whether the name of a model says where its weights are; else they are drawn, or its function has them."""
    return "@" in spec or spec.startswith("hf:") or spec.endswith(".pt2")


def in_evaluation(model: nn.Module) -> nn.Module:
    """Return a model in evaluation mode; the module of an exported program stays in the mode of its export."""
    return model if "_guards_fn" in model._modules else model.eval()  # there, `eval` raises an error


def _loaded(spec: str, seed: int) -> nn.Module:
    if is_huggingface_name(spec):
        folder, options = split_huggingface(spec)
        return seeded(partial(load_huggingface, folder, **options))
    # no builder's name holds an "@", while a path may
    builder, _, weights = spec.partition("@")
    if spec.endswith(".pt2") and ":" not in builder:
        return load_exported(Path(spec).expanduser())
    _require_named_weights(spec)
    model, drawn_from = seeded(partial(_watched, _builder(builder)), seed)
    if weights and _is_compressed(Path(weights).expanduser()):
        module, function = COMPRESSED
        return getattr(import_module(module), function)(Path(weights).expanduser(), model)
    if weights:
        load_weights(model, Path(weights).expanduser(), name=builder)
    elif drawn_from is not None:
        unless = "" if builder.startswith("netkin:") else ", unless its function reads some"
        keep_note(model, f"{spec!r} was given no weights, so they are random, drawn from seed {drawn_from}{unless}.")
    return model


def _require_named_weights(spec: str) -> None:
    _, at, weights = spec.partition("@")
    if at and not weights:
        raise SourceError(f"{spec!r} names no weights after the '@'; write {spec + 'FILE'!r} or leave the '@' out.")


def _is_compressed(path: Path) -> bool:
    """Return whether a file holds a compressed model, by the header that netkin writes."""
    try:
        return path.is_file() and read_header(path)["kind"] == "compressed"
    except FileError:  # weights of others
        return False


def _watched(builder: Callable[[], nn.Module]) -> tuple[nn.Module, int | None]:
    """Return what `builder` makes, and the seed of torch's random numbers that it drew; None if it drew none."""
    before = torch.get_rng_state()
    model = builder()
    return model, None if torch.equal(before, torch.get_rng_state()) else torch.initial_seed()


def _builder(name: str) -> Callable[[], nn.Module]:
    prefix, colon, rest = name.partition(":")
    if not colon or not rest:
        raise SourceError(_not_a_builder(name))
    if prefix == "netkin":
        return architecture(rest)
    return partial(_called, find_function(name, known=["netkin", "hf"]), name)


def _called(function: Callable[[], nn.Module], name: str) -> nn.Module:
    model = call_named(function, name)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{name!r} must return a torch.nn.Module; it returned an object of type {type(model).__name__}."
        )
    return model


def _not_a_builder(name: str) -> str:
    if Path(name).is_file():
        if name.endswith(".py"):
            return (
                f"{name!r} is a file of code; name the function in it that builds the network: {Path(name).stem}:NAME."
            )
        return (
            f"{name!r} is a file, and weights alone do not say what network they belong to; "
            f"write {'netkin:tiny10@' + name!r} or {'package.module:function@' + name!r}."
        )
    if Path(name).is_dir():
        return f"{name!r} is a folder; for a Hugging Face model write {'hf:' + name!r}."
    near = did_you_mean(name, ARCHITECTURES).replace("'", "'netkin:", 1)
    return (
        f"{name!r} is no model{near or '.'} A model is BUILDER[@WEIGHTS], where BUILDER is `netkin:tiny10` or "
        "`package.module:function`; or it is `hf:DIR` or the path of a `.pt2` file."
    )


# --- Hugging Face -----------------------------------------------------------------------------------------------------


DTYPES = ("float32", "float16", "bfloat16", "auto")
# kinds of PEFT that change weights, and no inputs; others make a prompt by a tokenizer that their file names
ADAPTERS = ("LORA", "LOHA", "LOKR", "IA3")
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_huggingface_name(spec: Any) -> bool:
    """Return whether a model's name is that of a Hugging Face model."""
    return isinstance(spec, str) and spec.startswith("hf:") and spec != "hf:"


def split_huggingface(spec: str) -> tuple[str, dict[str, str]]:
    """Return the folder and the options of `hf:DIR,option=value,...`; a folder's own name may hold commas.

    Example:
        >>> split_huggingface("hf:models/bert,dtype=bfloat16")
        ('models/bert', {'dtype': 'bfloat16'})
    """
    folder, options = spec.removeprefix("hf:"), dict[str, str]()
    while not Path(folder).expanduser().is_dir() and (found := re.fullmatch(r"(.+),(\w+)=([^,]+)", folder)):
        folder = found[1]
        options = {found[2]: found[3]} | options
    return folder, typed_options(load_huggingface, options, "hf:DIR", skip=1)


def load_huggingface(
    directory: str, dtype: str = "auto", adapter: str = "", device_map: str = "", memory: str = "", offload: str = ""
) -> nn.Module:
    """Return the model in a folder written by `save_pretrained`, with the head that its configuration names.

    Weights are safetensors where there are any, otherwise a `pytorch_model.bin` that is read as weights only. Code that
    comes with a model is not run, kernels and weights from elsewhere are not fetched.

    Args:
        directory: the folder.
        dtype: the precision of the weights; "auto" for that of the files.
        adapter: the folder of an adapter that PEFT saved, which is put into the model and not merged with its weights.
        device_map: where accelerate puts the parts of the model; empty for the CPU.
        memory: the most of the host's memory that `device_map` may use, such as "24GB".
        offload: the folder for what fits neither devices nor memory.
    """
    folder = Path(directory).expanduser()
    config = _config(folder)
    safe = _has_safetensors(folder)
    if dtype not in DTYPES:
        hint = did_you_mean(dtype, DTYPES) or "."
        raise InvalidValue(f"no dtype {dtype!r} for {str(folder)!r}{hint} There are {', '.join(DTYPES)}.")
    adapted = _adapter_of({"adapter": adapter} if adapter else {}, directory)
    with _transformers(folder) as transformers:
        model, loading = _model_class(transformers, config, folder).from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=safe,
            weights_only=True,
            output_loading_info=True,
            dtype=dtype,
            **_placement(device_map, memory, offload),
        )
    _require_all_weights(loading, folder, type(model).__name__)
    return model if adapted is None else _with_adapter(model, adapted, folder)


def _placement(device_map: str, memory: str, offload: str) -> dict[str, Any]:
    """Return where transformers is to put a model, by accelerate."""
    if not device_map:
        if memory or offload:
            raise InvalidValue(
                "`memory` and `offload` go with `device_map`, as in `hf:DIR,device_map=auto,memory=8GB`."
            )
        return {}
    accelerate = import_optional("accelerate", "hf", "`device_map`")
    placement: dict[str, Any] = {"device_map": device_map}
    if memory:
        placement["max_memory"] = accelerate.utils.get_max_memory() | {"cpu": memory}
    return placement | ({"offload_folder": str(Path(offload).expanduser())} if offload else {})


# --- adapters ---------------------------------------------------------------------------------------------------------


def _adapter_of(options: dict[str, str], base: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder and the configuration of the adapter that options name, which must be one for `base`."""
    if "adapter" not in options:
        return None
    folder = Path(options["adapter"]).expanduser()
    if not (folder / _ADAPTER).is_file():
        raise SourceError(
            f"{str(folder)!r} holds no {_ADAPTER}{near(folder) or ';'} `adapter=DIR` wants the folder of an adapter "
            "that PEFT saved."
        )
    config = read_json(folder / _ADAPTER, "configuration of an adapter")
    if config.get("peft_type") not in ADAPTERS:
        raise SourceError(
            f"the adapter in {str(folder)!r} is of the kind {config.get('peft_type')!r}; netkin loads "
            f"{', '.join(ADAPTERS)}, which change weights and nothing else."
        )
    if config.get("megatron_config"):  # its `megatron_core` names a module to be imported
        raise SourceError(f"the adapter in {str(folder)!r} names code of its own (megatron), and netkin runs none.")
    if not (folder / _ADAPTER_WEIGHTS).is_file():
        raise SourceError(
            f"{str(folder)!r} holds no {_ADAPTER_WEIGHTS}; adapters are read as safetensors only: save it again with "
            "`model.save_pretrained(DIR)`."
        )
    _require_its_base(folder, str(config.get("base_model_name_or_path") or ""), Path(base).expanduser())
    return folder, config


def _require_its_base(adapter: Path, named: str, base: Path) -> None:
    """Refuse an adapter whose configuration names another model, as far as this can be told from both folders."""
    other = Path(named).expanduser()
    origin = str(read_json(base / "config.json", "configuration of a model").get("_name_or_path") or "")
    if not named or named == origin:
        return
    if not other.is_dir():  # a model elsewhere: two names of one place that differ, or nothing to be told
        is_other = "/" in origin and "/" in named and not Path(origin).is_dir() and Path(origin).name != other.name
    else:
        names = [name for name in (*_WEIGHTS, "config.json") if (other / name).is_file() or (base / name).is_file()]
        is_other = not other.samefile(base) and bool(
            filecmp.cmpfiles(base, other, names, shallow=False)[1:] != ([], [])
        )
    if is_other:
        raise SourceError(
            f"the adapter in {str(adapter)!r} was made for {named!r}, and {str(base)!r} is another model; name that "
            "one, as in `hf:BASE,adapter=DIR`."
        )


def _with_adapter(model: nn.Module, adapter: tuple[Path, dict[str, Any]], base: Path) -> nn.Module:
    """Return a model with the layers of an adapter in it, under the names that it has without."""
    peft = import_optional("peft", "peft", "`adapter=DIR`")
    folder, config = adapter
    weights = read_state(folder / _ADAPTER_WEIGHTS)
    with _transformers(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wrapped = peft.PeftModel(model, peft.PeftConfig.from_pretrained(str(folder)), autocast_adapter_dtype=False)
            faults = mismatches(weights, peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False))
        except ValueError as error:  # no module has the names that the adapter wants
            faults = [in_short(error).rstrip(".")]
        if faults:
            named = repr(config.get("base_model_name_or_path") or "a model that it does not name")
            raise SourceError(
                f"the adapter in {str(folder)!r}, made for {named}, does not fit the model in {str(base)!r}: "
                f"{'; '.join(faults)}. Name the model that it was trained on, as in `hf:BASE,adapter=DIR`."
            )
        peft.set_peft_model_state_dict(wrapped, weights)
    return wrapped.get_base_model()


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise SourceError(
            f"{str(folder)!r} is no folder{near(folder) or '.'} `hf:DIR` wants one written by `save_pretrained`; "
            "netkin downloads nothing."
        )
    if (folder / _ADAPTER).is_file():  # from which transformers would load the model that it names, and the adapter
        raise SourceError(
            f"{str(folder)!r} holds an adapter; name the folder of its model, in which there is none, and this one as "
            f"the adapter: `hf:DIR,adapter={folder}`."
        )
    if not (folder / "config.json").is_file():
        raise SourceError(f"{str(folder)!r} holds no config.json; name the folder that `save_pretrained` wrote.")
    config = read_json(folder / "config.json", "configuration of a model")
    _require_no_foreign_code(config, folder)
    return config


def _require_no_foreign_code(config: dict[str, Any], folder: Path) -> None:
    """Refuse configurations that name code elsewhere: classes of their own, or kernels to be fetched."""
    if "auto_map" in config:
        raise SourceError(
            f"the model in {str(folder)!r} brings code of its own (auto_map), and netkin does not run it."
        )
    for key, value in config.items():
        if key.endswith("_implementation") and "/" in str(value):
            raise SourceError(f"{key!r} in {str(folder)!r} names a kernel to be fetched ({value}); remove it.")
        if isinstance(value, dict):
            _require_no_foreign_code(value, folder)


def load_tokenizer(directory: str) -> Any:
    """Return the tokenizer in a model's folder."""
    folder = Path(directory).expanduser()
    preprocessing(directory, "text")
    return _from_folder("AutoTokenizer", folder)


def load_processor(directory: str) -> Callable[[Tensor], Tensor]:
    """Return the image preprocessing in a model's folder, as a function of images of n × channels × height × width."""
    folder = Path(directory).expanduser()
    preprocessing(directory, "images")
    return partial(_processed, _from_folder("AutoImageProcessor", folder))


def preprocessing(directory: str, kind: str) -> dict[str, bytes]:
    """Return the files that decide how text or images, which `kind` names, reach the model in `directory`.

    A folder without any is refused.
    """
    folder = Path(directory).expanduser()
    names = (_PROCESSOR,) if kind == "images" else _TOKENIZERS
    files = {name: content(folder / name) for name in names if (folder / name).is_file()}
    if files and kind == "text":
        files |= {name: content(folder / name) for name in _TEMPLATES if (folder / name).is_file()}
    if _TOKENIZER_CONFIG in files:
        config = read_json(folder / _TOKENIZER_CONFIG, "configuration of a tokenizer")
        settings = {key: value for key, value in config.items() if key not in _PLACES}
        files[_TOKENIZER_CONFIG] = json.dumps(settings, sort_keys=True).encode()
    if not files and kind == "images":
        raise SourceError(
            f"{str(folder)!r} holds no {_PROCESSOR}, which says how its model expects images; write it there with "
            "`processor.save_pretrained`, or choose the preprocessing yourself: `normalise=none` or another."
        )
    if not files:
        raise SourceError(
            f"{str(folder)!r} holds no tokenizer, which says what numbers its model expects for a text; write it there "
            "with `tokenizer.save_pretrained`, or name a folder that has it: `text,tokenizer=DIR:FILE`."
        )
    return files


def _processed(processor: Any, images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        images = images.expand(-1, 3, -1, -1)
    listed = [image.permute(1, 2, 0).numpy() for image in images]
    return processor(listed, return_tensors="pt", input_data_format="channels_last")["pixel_values"]


def _from_folder(kind: str, folder: Path) -> Any:
    with _transformers(folder) as transformers:
        return getattr(transformers, kind).from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _has_safetensors(folder: Path) -> bool:
    present = [name for name in _WEIGHTS if (folder / name).is_file()]
    if not present:
        raise SourceError(f"{str(folder)!r} holds no weights; there must be one of {', '.join(_WEIGHTS)}.")
    if present[0].endswith(".index.json"):
        _require_all_shards(folder / present[0])
    if "safetensors" not in present[0]:
        for path in folder.glob("pytorch_model*.bin"):
            require_harmless(path)
    return "safetensors" in present[0]


def _require_all_shards(index: Path) -> None:
    """Refuse an index of weights that names files which are not there."""
    named = read_json(index, "index of weights").get("weight_map")
    shards = sorted({str(name) for name in named.values()}) if isinstance(named, dict) else []
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise SourceError(
            f"{str(index)!r} names {len(shards)} files of weights, of which {len(missing)} are not there: "
            f"{list_names(missing)}; fetch them, or copy the whole folder again."
        )


def _model_class(transformers: Any, config: dict[str, Any], folder: Path) -> Any:
    """Return the class that the configuration names, or the one without a head where it names none."""
    names = config.get("architectures") or []
    if not names:
        return transformers.AutoModel
    kind = getattr(transformers, str(names[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise SourceError(
            f"the model in {str(folder)!r} is a {str(names[0])!r}, which transformers {transformers.__version__} does "
            "not have."
        )
    return kind


def _require_all_weights(loading: dict[str, Any], folder: Path, kind: str) -> None:
    """Refuse weights that leave a part of the model as it was drawn at random."""
    names = {"missing": "missing_keys", "of another shape": "mismatched_keys"}
    faults = {what: sorted(map(str, loading.get(key) or ())) for what, key in names.items()}
    lists = [f"{len(keys)} {what}: {list_names(keys)}" for what, keys in faults.items() if keys]
    if lists:
        raise SourceError(
            f"the weights in {str(folder)!r} do not fit {kind}: {'; '.join(lists)}. Name the right class under "
            "`architectures` in its config.json."
        )


@contextmanager
def _transformers(folder: Path) -> Iterator[Any]:
    """Give the package transformers, which reads `folder` inside the `with` without logs and progress bars."""
    transformers = import_optional("transformers", "hf", "`hf:DIR`")
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(50)  # critical only
    log.disable_progress_bar()
    others = [logging.getLogger(name) for name in ("accelerate", "bitsandbytes")]
    levels = [logger.level for logger in others]
    for logger in others:
        logger.setLevel(50)
    try:
        yield transformers
    except NetkinError:
        raise
    except Exception as error:  # its errors have no common root but Exception
        raise SourceError(f"{str(folder)!r} could not be loaded by transformers: {in_short(error)}") from error
    finally:
        log.set_verbosity(verbosity)
        for logger, level in zip(others, levels, strict=True):
            logger.setLevel(level)
        if bars:
            log.enable_progress_bar()
