"""Everything of torch that is changed while a device is simulated, in one place: each change with its reason, all undone at exit.

Tensors are fake ones (shapes and types, no values) of device "cuda" or "cpu", and this machine may have no GPU. torch lets fake
"cuda" tensors compute forward; backward, streams, sharding and fused optimizers ask for a device that is not there. Nothing here
knows of a model or a plan. Seen to work with torch 2.13 (CPU build); tests/planner/test_fake_device.py says which change a new
torch no longer needs or no longer takes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed.pipelining.schedules as schedules
import torch.distributed.pipelining.stage as stages
import torch.distributed.tensor._sharding_prop as sharding_prop
import torch.optim.optimizer as optimizers
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from shoal.parallel import flash
from shoal.planner.streams import FakeStream, Streams

CUDA = 1  # c10::DeviceType
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
IS_BUILT, IS_AVAILABLE, HAS_PRIMARY_CONTEXT = (
    2,
    3,
    4,
)  # slots of AcceleratorHooksInterface's vtable, after 2 destructors
NUM_SLOTS = 40


class FakeDevice(NamedTuple):
    """What is simulated."""

    type: str
    """"cuda" or "cpu" """
    capability: tuple[int, int] = (9, 0)
    """of a "cuda" device; it decides which attention kernel is taken"""
    memory_bytes: int = 80 * 1024**3


@contextmanager
def fake_device(device: FakeDevice) -> Iterator[Streams]:
    """Let fake tensors of a device compute, inside of a `FakeTensorMode`. Not to be nested, and for one thread.

    Yields:
        The streams of the device, to ask which one is current.

    Raises:
        RuntimeError: torch does not have what is to be changed: this version is not known.
    """
    streams = Streams()
    with ExitStack() as undo:
        # device threads of autograd are counted at its first backward, when there may have been no device
        undo.enter_context(torch.autograd.set_multithreading_enabled(False))
        for change in (_data, _modules, _meshes, _sharding, _pipelining):
            change(undo)
        if device.type == "cuda":
            _require_no_gpu()
            for change in (_guard, _hooks, _foreach, _pinned):
                change(undo)
            _cuda_module(undo, streams, device)
            _attention(undo, device.capability)
            _rms_norm(undo)
        yield streams


@contextmanager
def outside() -> Iterator[None]:
    """Out of a simulated world for a while: tensors are real."""
    with _disable_current_modes():
        yield


def replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `undo` is closed.

    Raises:
        RuntimeError: the owner has no such attribute.
    """
    if not hasattr(owner, name):
        raise RuntimeError(
            f"torch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}, which simulation changes; use a torch "
            "that is known to work (docs/planning.md)"
        )
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    if own:
        undo.callback(setattr, owner, name, before)
    else:
        undo.callback(delattr, owner, name)


def _require_no_gpu() -> None:
    if torch.cuda.is_available():
        raise RuntimeError(
            "a GPU cannot be simulated in a process that sees one; set CUDA_VISIBLE_DEVICES= (empty) for it"
        )


def _library(name: str) -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    found = next(
        (path for path in sorted(folder.glob(f"lib{name}.*")) if path.suffix in (".so", ".dylib")), None
    )
    if found is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no lib{name} in {folder}; simulation of GPUs needs it"
        )
    return ctypes.CDLL(str(found))


def _guard(undo: ExitStack) -> None:
    """CPU builds have no device guard for CUDA, and the first backward of a fake tensor ends the process.

    torch has one that does nothing, which it puts in the place of a guard that counts no devices: so such a one is put there.
    """
    registry = (ctypes.c_void_p * 22).in_dll(_library("c10"), GUARDS)
    before = registry[CUDA]
    if before is not None:  # a CUDA build on a machine without a GPU
        torch._C._ensureCUDADeviceGuardSet()
        return
    no_devices = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda _: 0)
    table = (ctypes.c_void_p * 64)(*([ctypes.cast(no_devices, ctypes.c_void_p).value] * 64))
    guard = (ctypes.c_void_p * 4)(ctypes.addressof(table), 0, 0, 0)
    registry[CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if registry[CUDA] == ctypes.addressof(guard):
        registry[CUDA] = before
        raise RuntimeError(f"torch {torch.__version__} did not install its no-op CUDA guard")
    undo.callback(registry.__setitem__, CUDA, before)


def _hooks(undo: ExitStack) -> None:
    """Autograd asks CUDA's hooks whether CUDA is built (no: an error) and has a context (which throws without a driver).

    The hooks object gets a copy of its table of functions in which these two are replaced.
    """
    get_hooks = _library("torch_cpu")._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    before = hooks[0]
    if before is None:
        raise RuntimeError(f"torch {torch.__version__} has no CUDA hooks")
    offset = 2  # before the first function: offset to top, type information
    old = ctypes.cast(before - offset * 8, ctypes.POINTER(ctypes.c_void_p))
    new = (ctypes.c_void_p * NUM_SLOTS)(*[old[slot] for slot in range(NUM_SLOTS)])
    new[offset + IS_BUILT] = ctypes.cast(
        ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p
    ).value  # returns 1
    new[offset + HAS_PRIMARY_CONTEXT] = old[offset + IS_AVAILABLE]
    hooks[0] = ctypes.addressof(new) + offset * 8

    def restore(_kept: Any = new) -> None:
        hooks[0] = before

    undo.callback(restore)


def _cuda_module(undo: ExitStack, streams: Streams, device: FakeDevice) -> None:
    """What in `torch.cuda` would initialise CUDA. Dynamo knows functions by their identity: its table is made of torch's own
    before, and each name gets a function of its own.
    """
    import torch._dynamo.trace_rules

    torch._dynamo.trace_rules.get_torch_obj_rule_map()

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    @contextmanager
    def on(stream: FakeStream | None) -> Iterator[FakeStream | None]:
        if stream is None:
            yield None
            return
        with stream:
            yield stream

    properties = SimpleNamespace(
        name="simulated",
        major=device.capability[0],
        minor=device.capability[1],
        total_memory=device.memory_bytes,
    )
    changes: dict[str, Any] = {
        "Stream": streams.make,
        "Event": streams.event,
        "stream": on,
        "current_stream": lambda *_: streams.current,
        "default_stream": lambda *_: streams.default,
        "set_stream": lambda stream: setattr(streams, "current", stream),
        "current_device": always(0),
        "device_count": always(1),
        "is_initialized": always(True),
        "is_bf16_supported": always(True),
        "get_device_capability": always(device.capability),
        "get_device_properties": always(properties),
        "get_device_name": always("simulated"),
    }
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init", "manual_seed", "manual_seed_all"):
        changes[name] = always(None)
    for name, value in changes.items():
        replace(undo, torch.cuda, name, value)
    replace(undo, Tensor, "record_stream", lambda *_: None)
    replace(undo, torch.backends.cudnn, "is_available", always(True))


def _foreach(undo: ExitStack) -> None:
    """torch's norms and optimizers take many tensors at once for listed types alone, and fake ones are not listed."""
    for module in (optimizers, foreach_utils):
        listed = [*module._foreach_supported_types, FakeTensor]
        replace(undo, module, "_foreach_supported_types", listed)


def _pinned(undo: ExitStack) -> None:
    """Fake tensors cannot be pinned; where they are is all that counts. See `Tape`, too, which makes new ones unpinned."""
    replace(undo, Tensor, "pin_memory", lambda self, *_: torch.empty_like(self))
    replace(undo, Tensor, "is_pinned", lambda *_: True)


def _data(undo: ExitStack) -> None:
    """`tensor.data = other` leaves a fake tensor's device as it was, and so models that are moved stay where they were."""
    original: Any = Tensor.data  # pyrefly: ignore[missing-attribute] - a property of the class

    def move(self: FakeTensor, value: Tensor) -> None:
        original.__set__(self, value)
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device

    replace(undo, FakeTensor, "data", property(original.__get__, move))


def _modules(undo: ExitStack) -> None:
    """`Module.to` and `to_empty` change parameters in place, which torch refuses for fake ones: they are replaced here."""
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        memo: dict[nn.Parameter, nn.Parameter] = {}

        def over(module: nn.Module) -> None:
            for child in module.children() if recurse else ():
                child._apply(fn) if type(child)._apply is not apply else over(child)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if parameter not in memo:
                        with torch.no_grad():
                            memo[parameter] = nn.Parameter(
                                fn(parameter), requires_grad=parameter.requires_grad
                            )
                    module._parameters[name] = memo[parameter]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)

        over(self)
        return self

    apply.__doc__ = original.__doc__
    replace(undo, nn.Module, "_apply", apply)


def _meshes(undo: ExitStack) -> None:
    """A mesh reads its table of ranks (`.tolist()`), which fake tensors cannot give: its methods run outside of the mode."""

    def outside(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return method(*args, **kwargs)

        return run

    for name in ("__init__", "__getitem__", "_flatten", "_unflatten", "get_group", "get_coordinate"):
        if hasattr(DeviceMesh, name):
            replace(undo, DeviceMesh, name, outside(getattr(DeviceMesh, name)))


def _sharding(undo: ExitStack) -> None:
    """DTensor learns an operation's shapes from whole fake tensors, in the mode that is active: they would count as memory.

    It gets a mode of its own, as it has where nothing is simulated.
    """
    replace(undo, sharding_prop, "detect_fake_mode", lambda *_: None)


def _attention(undo: ExitStack, capability: tuple[int, int]) -> None:
    """torch asks the device which attention kernel to take, and without one takes the one that keeps all scores.

    Here is what a device takes of those that `shoal.train.kernels` allows, best first.
    """
    aten: Any = torch.ops.aten

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        half = query.dtype in (torch.float16, torch.bfloat16)
        fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= (128 if attn_mask is not None else 256)
        if half and fits and capability >= (8, 0):
            # torch refuses its flash attention, whichever it is, for some shapes
            square = query.shape[-1] == value.shape[-1] and (not is_causal or query.shape[2] == key.shape[2])
            flash_first = flash.is_active() and attn_mask is None and square
            if capability >= (9, 0) and query.shape[-1] <= 128 and not flash_first:
                keeps = query.requires_grad or key.requires_grad or value.requires_grad
                found = aten._scaled_dot_product_cudnn_attention(
                    query, key, value, attn_mask, keeps, dropout_p, is_causal, False, scale=scale
                )
                return found[0]
            if attn_mask is None:
                found = aten._scaled_dot_product_flash_attention(
                    query, key, value, dropout_p, is_causal, False, scale=scale
                )
                return found[0]
        if query.shape[1] == key.shape[1] and query.shape[-1] % 4 == 0:
            keeps = query.requires_grad or key.requires_grad or value.requires_grad
            bias = _as_bias(attn_mask, query, key)
            found = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
            )
            return found[0]
        found = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return found[0]

    library = torch.library.Library("aten", "IMPL")
    undo.callback(library._destroy)
    library.impl("scaled_dot_product_attention", attend, "AutogradCUDA", allow_override=True)
    undo.callback(flash.deactivate)


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as numbers that are added to scores, as torch makes it for the kernels that want them."""
    if mask is None:
        return None
    bias = torch.empty_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _rms_norm(undo: ExitStack) -> None:
    """CPU builds take `F.rms_norm` apart into nine operations; on GPUs it is one, whose gradient is one too."""
    if torch.cuda._is_compiled():
        return
    aten: Any = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")
    undo.callback(library._destroy)

    def never(*_: Any, **__: Any) -> None:
        raise RuntimeError("a kernel of a simulated device was asked for values")

    for name in (
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
    ):  # the operation's own gradient is taken if there is a kernel
        library.impl(name, never, "CUDA")

    def norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return aten._fused_rms_norm(x, shape, weight, eps)[0]

    library.impl("rms_norm", norm, "AutogradCUDA", allow_override=True)


def _pipelining(undo: ExitStack) -> None:
    """Stages of a pipeline ask each other, before the first step, how they learn their shapes, and read the answer.

    Here they learn them on trial, as Shoal's stages do; what others would have told is in `shoal.planner.stages`.
    """
    if not hasattr(stages, "InferenceMode"):
        return
    mode = stages.InferenceMode.DYNAMIC

    def vote(_self: Any, found: list[Any], *_: Any) -> None:
        for stage in found:
            stage._inference_mode = mode

    replace(undo, schedules._PipelineSchedule, "_warmup_p2p", vote)

    @contextmanager
    def no_fork(*_: Any, **__: Any) -> Iterator[None]:
        yield

    replace(undo, torch.random, "fork_rng", no_fork)
