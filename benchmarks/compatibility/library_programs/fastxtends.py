"Programs of fastxtend: its callbacks, optimizers, schedules and blocks"
import importlib,sys,types
from functools import partial
import torch
from benchmarks.compatibility.library_programs.common import (
    CrossEntropyLossFlat,LabelSmoothingCrossEntropyFlat,Learner,accuracy,cnn,end,fitted,images,last,lr_find,names)

def fastxtend():
    return names('fastxtend', *(f'callback.{o}' for o in ('amp','channelslast','ema','gradaccum','lr_finder','profiler')),
                 *(f'optimizer.{o}' for o in ('fused','lion','sophia')), 'vision.models.xresnet')

def fastxtend_old():
    "Imports all of fastxtend 0.1.7, which needs three names that fastcore and PyTorch have removed since"
    import plum
    cast,transform = (importlib.import_module(f'fasttransform.{o}') for o in ('cast','transform'))
    dispatch = types.ModuleType('fastcore.dispatch')
    vars(dispatch).update({k:v for k,v in vars(cast).items() if k[:2]!='__'}, typedispatch=plum.dispatch)
    sys.modules |= {'fastcore.dispatch':dispatch, 'fastcore.transform':transform}
    torch.serialization.FILE_LIKE = torch.serialization.FileLike
    return names('fastxtend', 'vision.all', 'multiloss', 'callback.compiler')

def fx(to, x, cb=lambda x: None, model=cnn, fit=lambda learn,x,cbs: fitted(learn, 3, cbs), **kwargs):
    "Fits a small network on images; functions make callbacks, model and arguments of `Learner` from fastxtend's names"
    return fit(to(Learner(images(), model(x), **dict(dict(metrics=accuracy), **{k: v(x) for k,v in kwargs.items()}))), x, cb(x))
def call(name, *args, **kwargs): return lambda learn,x,cbs: last(getattr(learn, name)(*args, cbs=cbs, **kwargs), end(learn))
def explained(learn, x, cbs): return last(learn.fit(1, cbs=x.DynamoExplainCallback(print_results=False)), fitted(learn))
def ended(learn, x, cbs):
    learn.fit(1)
    learn.to_fp32() # fastxtend's own, which replaces fastai's
    if hasattr(learn, 'mixed_precision'): raise AssertionError('`to_fp32` leaves it on')
    return fitted(learn)
def compiled(learn, x, cbs):
    torch.cuda.get_device_capability = lambda: (7,0) # `compile` asks for the generation of the GPU even if there is none
    return fitted(learn.compile(backend='aot_eager'))
def losses(x): return x.MultiLoss([CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat], weights=[1,0.5])
def metrics(x): return [x.Accuracy(), x.Accuracy(log_metric=x.LogMetric.Train), x.F1Score(average='macro')]
def block(name, **kwargs): return lambda x: x.XResNet(getattr(x, name), 1, [1,1], n_out=3, stem_szs=(8,8,8), block_szs=[8,16], **kwargs)
def fx_cb(name, *args, **kwargs): return partial(fx, cb=lambda x: getattr(x, name)(*args, **kwargs))
def fx_opt(name, *how): return partial(fx, opt_func=lambda x: getattr(x, name)(**dict.fromkeys(how, True)))
resize = dict(start=0., finish=0.7, verbose=False)
of_fx = {
    'EMACallback': fx_cb('EMACallback', 0.9), 'EMACallback(replace_weights)': fx_cb('EMACallback', 0.9, replace_weights=True),
    'EMASchedule': fx_cb('EMASchedule', 0.5, 0.9), 'GradientAccumulation': fx_cb('GradientAccumulation', 16),
    'GradientAccumulation(drop_last=False)': fx_cb('GradientAccumulation', 16, drop_last=False),
    'GradientAccumulationSchedule': fx_cb('GradientAccumulationSchedule', 8, 24), 'lr_find': partial(fx, fit=lr_find),
    'profile': partial(fx, fit=lambda learn,x,cbs: fitted(learn.profile('simple', show_report=False))),
    'to_channelslast': partial(fx, fit=lambda learn,x,cbs: fitted(learn.to_channelslast(use_amp=False))),
    'its to_fp32 after ours': partial(fx, fit=ended), 'its to_fp16 before ours': lambda to,x: fx(lambda learn: to(learn.to_fp16()), x),
    'sophia': partial(fx, opt_func=lambda x: x.sophia(), cb=lambda x: x.SophiaCallback(2)),
    **{f"{n}({''.join(how)})": fx_opt(n, *how) for n,*how in
       (('adam','foreach'), ('rmsprop','jit'), ('larc','jit'), ('lamb','foreach'), ('ranger','foreach'), ('lion',))},
    **{f'XResNet of {o}': partial(fx, model=block(o, **kw)) for o,kw in
       (('SEBlock',dict(se_reduction=4)), ('SABlock',dict(sa_grps=4)), ('TABlock',{}))}}
of_old = {
    'ProgressiveResize': fx_cb('ProgressiveResize', **resize), **{o: fx_cb(o) for o in ('MixUp','CutMix','CutMixUp')},
    'ProgressiveResize(preallocate=False)': fx_cb('ProgressiveResize', **resize, preallocate=False, final_size=(16,16)),
    'metrics': partial(fx, metrics=metrics), 'MultiLoss': partial(fx, loss_func=losses, cb=lambda x: x.MultiLossCallback()),
    'MultiLoss, MixUp': partial(fx, loss_func=losses, cb=lambda x: [x.MultiLossCallback(), x.MixUp()]),
    **{k: partial(fx, fit=call(k, 4, 3e-3, **kw)) for k,kw in
       (('fit_flat_warmup',{}), ('fit_cos_anneal',{}), ('fit_flat_varied',dict(next_lr=1e-3, change_by=2)))},
    'compile': partial(fx, fit=compiled), 'DynamoExplainCallback': partial(fx, fit=explained),
    'adam, EMACallback, ProgressiveResize, CutMixUp': partial(fx, fit=call('fit_flat_warmup', 3, 3e-3),
        opt_func=lambda x: x.adam(foreach=True), cb=lambda x: [x.EMACallback(0.9), x.ProgressiveResize(**resize), x.CutMixUp()])}
