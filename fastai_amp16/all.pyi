# tools/stubs.py makes this file from the signatures
from collections.abc import Callable,Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any,TypeVar
import torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import AMPMode,MixedPrecision
from fastai.learner import Metric
from fastai.optimizer import Lookahead,Optimizer
from pandas import DataFrame
from torch import Tensor,nn
from torch.amp import GradScaler

Real = float # for checkers, a float is no `numbers.Real`
Class = TypeVar('Class', bound=type)

__all__ = ['DynamicScaler', 'PrecisionPlan', 'half_forward', 'register_norm', 'swap_module', 'AdamW16', 'Adam16',
           'RAdam16', 'Lamb16', 'QHAdam16', 'Larc16', 'RMSProp16', 'ranger16', 'FusedAdam', 'GradientNormClip',
           'PrecisionReport', 'GradNorm', 'LossScale', 'SkippedSteps', 'PrecisionWarning', 'DynamicMixedPrecision',
           'Checkup', 'Finding', 'PrecisionComparison']

class DynamicScaler(GradScaler):
    hysteresis: int
    min_scale: float
    max_scale: float
    dynamic: bool
    start: float
    proven: bool
    def __init__(
        self,
        device: str = 'cuda',
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 500,
        hysteresis: int = 1,
        min_scale: float = 2.**-24,
        max_scale: float = 2.**24,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None: ...
    def get_scale(self) -> float: ...
    def update(self, new_scale: float | Tensor | None = None, found_inf: bool | None = None) -> Any: ...
    def state_dict(self) -> dict[Any, Any]: ...
    def load_state_dict(self, state_dict: dict[Any, Any]) -> Any: ...
    @property
    def moves(self) -> bool: ...
    def took(self, scale: float) -> Any: ...

class PrecisionPlan:
    wrapped: Any
    model: nn.Module
    dtype: torch.dtype
    params: list[Any]
    device_type: str
    n_passes: int
    masters: Any
    kept: dict[Any, Any]
    own_code: dict[Any, Any]
    recurrent_in_bf16: set[Any]
    half_parts: dict[Any, Any]
    in_kept: set[Any]
    in_fp32: set[Any]
    own_code_kept: set[Any]
    in_own_code: set[Any]
    roles: dict[Any, Any]
    in_half: list[Any]
    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.float16,
        keep_fp32: list[Any] | str | type | nn.Module | Callable[..., Any] | None = None,
    ) -> None: ...
    def autocast(self) -> AbstractContextManager[Any]: ...
    def forward_pass(self) -> AbstractContextManager[Any]: ...

def half_forward(
    model: nn.Module,
    dtype: torch.dtype = torch.float16,
    keep_fp32: list[Any] | str | type | nn.Module | Callable[..., Any] | None = None,
) -> AbstractContextManager[Any]: ...

def register_norm(cls: Class) -> Class: ...

def swap_module(model: nn.Module, old: type, new: Any) -> nn.Module: ...

def AdamW16(
    params: Tensor | Iterable[Any],
    lr: float | slice,
    *,
    mom: float = 0.9,
    sqr_mom: float = 0.99,
    eps: float = 1e-05,
    wd: Real = 0.01,
    decouple_wd: bool = True,
) -> FusedAdam: ...

def Adam16(
    params: Tensor | Iterable[Any],
    lr: float | slice,
    *,
    mom: float = 0.9,
    sqr_mom: float = 0.99,
    eps: float = 1e-05,
    wd: Real = 0.01,
    decouple_wd: bool = False,
) -> FusedAdam: ...

def RAdam16(
    params: Tensor | Iterable[Any],
    lr: float | slice,
    mom: float = 0.9,
    sqr_mom: float = 0.99,
    *,
    eps: float = 1e-05,
    wd: Real = 0.0,
    beta: float = 0.0,
    decouple_wd: bool = True,
) -> Optimizer: ...

def Lamb16(
    params: Tensor | Iterable[Any],
    lr: float | slice,
    mom: float = 0.9,
    sqr_mom: float = 0.99,
    *,
    eps: float = 1e-05,
    wd: Real = 0.0,
    decouple_wd: bool = True,
) -> Optimizer: ...

def QHAdam16(
    params: Tensor | Iterable[Any],
    lr: float | slice,
    mom: float = 0.999,
    sqr_mom: float = 0.999,
    nu_1: float = 0.7,
    nu_2: float = 1.0,
    *,
    eps: float = 1e-05,
    wd: Real = 0.0,
    decouple_wd: bool = True,
) -> Optimizer: ...

def Larc16(
    params: Tensor | Iterable[Any],
    lr: float | slice,
    mom: float = 0.9,
    clip: bool = True,
    trust_coeff: float = 0.02,
    *,
    eps: float = 1e-05,
    wd: Real = 0.0,
    decouple_wd: bool = True,
) -> Optimizer: ...

def RMSProp16(
    params: Tensor | Iterable[Any],
    lr: float | slice,
    mom: float = 0.0,
    sqr_mom: float = 0.99,
    *,
    eps: float = 1e-05,
    wd: Real = 0.0,
    decouple_wd: bool = True,
) -> Optimizer: ...

def ranger16(
    params: Tensor | Iterable[Any],
    lr: float | slice,
    mom: float = 0.95,
    wd: Real = 0.01,
    *,
    eps: float = 1e-05,
    k: int = 6,
    alpha: float = 0.5,
    sqr_mom: float = 0.99,
    beta: float = 0.0,
    decouple_wd: bool = True,
) -> Lookahead: ...

class FusedAdam(Optimizer):
    cbs: Any
    state: dict[Any, Any]
    param_lists: Any
    hypers: Any
    frozen_idx: int
    decouple_wd: bool
    def __init__(
        self,
        params: Tensor | Iterable[Any],
        lr: float | slice,
        mom: float = 0.9,
        sqr_mom: float = 0.99,
        eps: float = 1e-05,
        wd: Real = 0.01,
        decouple_wd: bool = True,
    ) -> None: ...
    def zero_grad(self) -> Any: ...
    def step(self, closure: Any = None) -> Any: ...

class GradientNormClip(Callback):
    order: int
    max_norm: float
    norm_type: float
    def __init__(self, max_norm: float = 1.0, norm_type: float = 2.0) -> None: ...
    @property
    def norms(self) -> list[Any]: ...
    def plot(self, ax: Any = None) -> Any: ...

@dataclass
class PrecisionReport:
    verdict: str
    sentence: str
    remedy: str = ''
    producer: str | None = None
    op: str | None = None
    table: DataFrame = ...
    scale: float = 1.0
    new_scale: float | None = None
    promoted: list[Any] = ...
    samples: list[Any] = ...
    dtype: torch.dtype = torch.float16
    done: str = ''
    matter: str = ''
    @property
    def fp32_fails(self) -> bool: ...
    @property
    def hint(self) -> str: ...
    @property
    def warning(self) -> str: ...
    def plot(self, ax: Any = None) -> Any: ...
    def to_dict(self) -> dict[Any, Any]: ...

class GradNorm(Metric):
    mp: Any
    def reset(self) -> Any: ...
    def accumulate(self, learn: Any) -> Any: ...
    @property
    def value(self) -> Any: ...

class LossScale(Metric):
    mp: Any
    def reset(self) -> Any: ...
    def accumulate(self, learn: Any) -> Any: ...
    @property
    def value(self) -> Any: ...

class SkippedSteps(Metric):
    mp: Any
    def reset(self) -> Any: ...
    def accumulate(self, learn: Any) -> Any: ...
    @property
    def value(self) -> Any: ...

class PrecisionWarning(UserWarning): ...

class DynamicMixedPrecision(MixedPrecision):
    name: str
    order: int
    plan: Any
    ranks: Any
    step: Any
    states: Any
    resumed: Any
    left_out: Any
    context: Any
    rank_states: tuple[Any, ...]
    skipped: bool
    agreed: bool
    infinite_model: Any
    is_diagnosing: bool
    last_notice: Any
    change: Any
    comment: str
    stopped: Any
    keep_fp32: list[Any] | str | type | nn.Module | Callable[..., Any] | None
    on_spiral: str
    patience: int
    rerun: bool
    amp_mode: AMPMode
    kwargs: dict[Any, Any]
    scaler: DynamicScaler
    log: Any
    scales: Any
    comparison: Any
    said: set[Any]
    reports: list[PrecisionReport]
    promoted: list[Any]
    def __init__(
        self,
        amp_mode: str | AMPMode = 'fp16',
        keep_fp32: list[Any] | str | type | nn.Module | Callable[..., Any] | None = None,
        on_spiral: str = 'heal',
        patience: int = 3,
        rerun: bool = True,
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 500,
        hysteresis: int = 1,
        min_scale: float = 2.**-24,
        max_scale: float = 2.**24,
        dynamic: bool = True,
    ) -> None: ...
    @property
    def training(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def autocast(self) -> torch.autocast: ...
    @property
    def n_skipped(self) -> int: ...
    @property
    def n_rerun(self) -> int: ...
    @property
    def step_norm(self) -> float | None: ...
    @property
    def history(self) -> DataFrame: ...
    def keeps(self, model: Any) -> Any: ...
    def promoted_in(self, model: Any) -> Any: ...
    def make_plan(self, model: Any) -> Any: ...
    def ready(self, entry: Any = None) -> Any: ...
    def begin_fit(self, goes_on: Any) -> Any: ...
    def agree(self) -> Any: ...
    def around_step(self, f: Any) -> Any: ...
    def record_step(self) -> Any: ...
    def skip_step(self) -> Any: ...
    def end_step(self, scale: Any, skipped: Any) -> Any: ...
    def end_fit(self) -> Any: ...
    def begin_step(self, entry: Any, can_rerun: Any, is_second: bool = False) -> Any: ...
    def begin_batch(self, entry: Any) -> Any: ...
    def compares(self) -> Any: ...
    def around_batch(self, entry: Any, f: Any) -> Any: ...
    def make_attempts(self, f: Any) -> Any: ...
    def next_attempt(self) -> Any: ...
    def end_batch(self, end: Any) -> Any: ...
    def asking(self, entry: Any) -> AbstractContextManager[Any]: ...
    def say_once(self, text: Any, key: Any = None) -> Any: ...
    def to_dict(self) -> dict[Any, Any]: ...
    def plot(self, axs: Any = None, fit: int | None = None, last: bool = False) -> Any: ...
    @property
    def headroom(self) -> DataFrame: ...
    def plot_headroom(self, axs: Any = None) -> Any: ...

class Checkup(list[Finding]):
    report: PrecisionReport | None
    def __init__(self, findings: Iterable[Any] = (), report: PrecisionReport | None = None) -> None: ...
    @property
    def sentence(self) -> str: ...

@dataclass
class Finding:
    severity: str
    module: str | None
    fact: str
    remedy: str
    others: list[Any] = ...
    @property
    def where(self) -> str: ...

@dataclass
class PrecisionComparison:
    table: DataFrame
    sentence: str
    recommended: str
    def plot(self, axs: Any = None) -> Any: ...
