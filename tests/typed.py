"A program that uses every public name, for type checkers: tests/test_types.py lets mypy read it; nobody runs it"
import math
from functools import partial
import torch
from fastai.basics import DataLoaders,Learner
from torch import nn
from fastai_amp16.all import *
from fastai_amp16.all import __all__ as public

class Scale(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

@register_norm
class MyNorm(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.n = n

def of_models(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    n: int = MyNorm(8).n
    model = swap_module(model, nn.Sigmoid, nn.Hardsigmoid)
    swap_module(model, nn.Sigmoid, lambda old: nn.Hardsigmoid())
    plan = PrecisionPlan(model, torch.bfloat16, keep_fp32=['head', nn.Softmax])
    with plan.forward_pass(), plan.autocast(): model(x)
    with half_forward(model): pass
    with half_forward(model, torch.bfloat16, keep_fp32=lambda m: isinstance(m, Scale)): pass
    for kept in (None, 'head', nn.Softmax, model, ['head', model]): half_forward(model, keep_fp32=kept)
    with half_forward(model): return model(x)*n

def of_scalers(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> dict:
    scaler = DynamicScaler('cpu', init_scale=2**10, max_scale=math.inf, hysteresis=2, dynamic=True, enabled=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.update(2.**8)
    scaler.update(None, found_inf=True)
    scale: float = scaler.get_scale()
    if scaler.moves and scaler.proven: scaler.took(scale/scaler.start)
    scaler.load_state_dict(scaler.state_dict())
    return scaler.state_dict()

def of_optimizers(model: nn.Module, dls: DataLoaders) -> list:
    adam: FusedAdam = AdamW16(model.parameters(), lr=1e-3)
    adam.zero_grad()
    adam.step()
    adam = partial(AdamW16, eps=1e-4)(model.parameters(), 1e-3)
    FusedAdam([[*model.parameters()]], slice(1e-4, 1e-3), mom=0.9, sqr_mom=0.99, eps=1e-4, wd=0, decouple_wd=False)
    for opt_func in (Adam16, RAdam16, Lamb16, QHAdam16, Larc16, RMSProp16, ranger16): opt_func(model.parameters(), 1e-3, wd=0.1)
    Learner(dls, model, cbs=GradientNormClip(1.), metrics=[LossScale(), SkippedSteps(), GradNorm()])
    clip = GradientNormClip(max_norm=1, norm_type=math.inf)
    clip.plot()
    clip.plot(ax=None)
    return [clip.max_norm, *clip.norms, adam.decouple_wd]

def of_learners(learn: Learner) -> dict:
    learn.add_cb(DynamicMixedPrecision())
    learn.add_cb(DynamicMixedPrecision('bf16', keep_fp32=None, on_spiral='warn', patience=3, rerun=False, init_scale=2.**10))
    learn.to_fp16_dynamic(keep_fp32='head').to_bf16_dynamic()
    mp: DynamicMixedPrecision = learn.mixed_precision
    n: int = mp.n_skipped+mp.n_rerun+mp.patience
    if mp.rerun and mp.stopped: print(n, mp.amp_mode.value, mp.dtype.itemsize, mp.comment.title(), mp.keep_fp32, mp.change)
    mp.plot()
    mp.plot(axs=None, fit=None, last=True)
    mp.plot_headroom()
    print(mp.history.tail(20).to_string(), mp.headroom.bits, mp.scaler.get_scale()*2, mp.step_norm or 0., mp.promoted)
    with mp.autocast: pass
    for report in mp.reports: of_reports(report)
    return mp.to_dict()

def of_reports(report: PrecisionReport) -> list[str]:
    report.plot()
    report.plot(ax=None)
    scale: float = report.scale if report.new_scale is None else report.new_scale
    if report.fp32_fails or report.dtype==torch.bfloat16: print(scale, report.table.bits, report.to_dict()['verdict'])
    words = [report.verdict, report.sentence, report.remedy, report.done, report.hint, report.warning]
    return [*words, report.producer or '', report.op or '', *report.promoted, *report.samples]

def of_checkups(learn: Learner) -> Checkup:
    checkup: Checkup = learn.fp16_doctor()
    for o in checkup: print(o.severity.title(), o.where.title(), o.fact.title(), o.remedy.title(), len(o.others), o.module or '')
    if checkup.report: of_reports(checkup.report)
    print(checkup.sentence.title(), checkup[0].fact, public)
    if not checkup: raise PrecisionWarning('none')
    return Checkup([Finding('info', None, 'A fact.', 'A remedy', others=['head'])], PrecisionReport('healthy', 'Fine.', producer=None))
