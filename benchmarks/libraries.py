"Do programs that use tsai and fastxtend run with `to_fp16_dynamic` and `to_bf16_dynamic`, and end with the same losses as in fp32?"
import argparse,importlib,importlib.metadata,importlib.util,io,json,math,multiprocessing,os,re,sys,tempfile,types,warnings
from contextlib import redirect_stderr,redirect_stdout
from functools import partial
from pathlib import Path
if __name__=='__main__': os.environ.update(CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', MPLBACKEND='agg') # a forked process has no GPU
import fastai,numpy as np,pandas as pd,torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.vision.all import (Callback,CategoryBlock,ConvLayer,CrossEntropyLossFlat,DataBlock,ImageBlock,IndexSplitter,
        LabelSmoothingCrossEntropyFlat,Learner,Normalize,PoolFlatten,accuracy,aug_transforms,imagenet_stats,nn,set_seed)
from machine import machine

contenders = dict(plain=None, fp16='to_fp16_dynamic', bf16='to_bf16_dynamic')

def names(library, *modules):
    "Everything that the given modules of a library define, as attributes of one object"
    found = [vars(importlib.import_module(f'{library}.{o}')) for o in reversed(modules)]
    return types.SimpleNamespace(**{k:v for o in found for k,v in o.items()})

class Steps(Callback):
    n = 0
    def after_step(self): self.n += 1

def last(*args): return args[-1]
def end(learn, more=last):
    "The result of a program: steps taken, losses of `Recorder`, and predictions (and `more(learn)`, if it is a tensor)"
    losses = [*map(float, learn.recorder.losses)]
    with learn.no_bar(), learn.no_logging(): preds = [o for o in (learn.get_preds()[0], more(learn)) if isinstance(o, torch.Tensor)]
    return dict(steps=learn.steps.n, losses=losses, preds=torch.cat([o.flatten().double() for o in preds]).tolist())
def fitted(learn, epochs=2, cbs=None, **kwargs): return last(learn.fit_one_cycle(epochs, 1e-3, cbs=cbs), end(learn, **kwargs))
def lr_find(learn, *_, **kwargs): return last(learn.lr_find(num_it=12, show_plot=False), fitted(learn))

# %% tsai: each program takes a function that puts a learner into half precision, and the library's names
def tsai():
    return names('tsai', 'basics', 'callback.MVP', 'callback.experimental', 'losses', 'calibration', *(f'data.{o}' for o in
        ('mixed_augmentation','mixed','tabular')), *(f'models.{o}' for o in ('MultiInputNet','TabModel','utils')))

def series(n=40, classes=3, length=24):
    "Series of two noisy sines, whose frequency depends on the class, with indices of training and validation set"
    rng,y = np.random.default_rng(0),np.arange(n)%classes
    X = np.sin(np.arange(length)*(0.3+0.3*y[:,None,None])+rng.uniform(0, 6, (n,1,1)))+0.3*rng.standard_normal((n,2,length))
    return X.astype('float32'),y,(list(range(n-16)),list(range(n-16, n)))
def tfms(t, kind): return dict(tfms=[None, getattr(t, kind)()], batch_tfms=t.TSStandardize(), bs=8)
def ts_dls(t, X, y, splits, kind='TSClassification'): return t.get_ts_dls(X, y, splits=splits, **tfms(t, kind))

def ts(to, t, arch='InceptionTime', number=False, classes=3, fit=fitted, more=last, **kwargs):
    "Fits a `ts_learner`, for classes or for a number; arguments that are functions are called with tsai's names first"
    X,y,splits = series(classes=classes)
    dls = ts_dls(t, X, X.std((1,2)), splits, 'TSRegression') if number else ts_dls(t, X, y, splits)
    kwargs = {k: v(t) if callable(v) else v for k,v in kwargs.items()}
    return fit(to(t.ts_learner(dls, arch, metrics=t.mae if number else t.accuracy, **kwargs)), more=partial(more, t))

def reload(to, t, cls, arch, **config):
    "The example in tsai's README: fit, export, load, predict"
    X,y,splits = series()
    if cls=='TSForecaster': X,kind,y = X[...,:-4],'TSForecasting',X[...,-4:].copy()
    else: kind,y = ('TSRegression',X.std((1,2))) if cls=='TSRegressor' else ('TSClassification',y.astype(str))
    learn = to(getattr(t, cls)(X, y, splits=splits, path='.', arch=arch, arch_config=config, **tfms(t, kind)))
    return fitted(learn, more=lambda learn: last(learn.export('all.pkl'), t.load_learner('all.pkl').get_X_preds(X[splits[1]])[0]))

def mvp(to, t):
    X,y,splits = series()
    dls = t.get_ts_dls(X, splits=splits, batch_tfms=t.TSStandardize(), bs=8)
    first = fitted(to(t.ts_learner(dls, 'TSTPlus', cbs=t.MVP(target_dir='.', fname='mvp'), **transformer)))
    learn = t.ts_learner(ts_dls(t, X, y, splits), 'TSTPlus', pretrained=True, weights_path='mvp.pth', metrics=t.accuracy, **transformer)
    return fitted(to(learn), more=lambda learn: torch.tensor(first['losses']))

def multi_input(to, t):
    X,y,splits = series()
    df = pd.DataFrame(dict(a=X.mean((1,2)), b=(X[:,0,0]>0).astype(str), y=y.astype(str)))
    dls,rows = ts_dls(t, X, y.astype(str), splits),t.get_tabular_dls(df, cat_names='b', cont_names='a', y_names='y', splits=splits, bs=8)
    body = t.build_ts_model(t.get_arch('InceptionTimePlus'), dls=dls, nf=4)
    model = t.MultiInputNet(body, t.build_tabular_model(t.TabModel, dls=rows), c_out=3)
    return fitted(to(t.Learner(t.get_mixed_dls(dls, rows, bs=8), model, metrics=t.accuracy)))

def weighted(t): return t.WeightedPerSampleLoss(torch.linspace(0.5, 2, len(series()[2][0])))
def importance(t, learn): return [getattr(learn, o)(show_chart=False, random_state=0) for o in ('feature_importance','step_importance')]
net,transformer,flat = partial(ts, nf=4),dict(n_layers=1, d_model=16, n_heads=2, d_ff=32),dict(d_model=16, depth=1)
of_ts = {
    'TSClassifier, export, load_learner, get_X_preds': partial(reload, cls='TSClassifier', arch='InceptionTime', nf=4),
    'TSRegressor, the same': partial(reload, cls='TSRegressor', arch='TSTPlus', **transformer),
    'TSForecaster with PatchTST, the same': partial(reload, cls='TSForecaster', arch='PatchTST', **transformer, patch_len=8, stride=4),
    'lr_find': partial(net, fit=lr_find), 'regression': partial(net, number=True), 'MVP, then a fit from its weights': mvp,
    'wrap_optimizer(AdamW)': partial(net, opt_func=lambda t: t.wrap_optimizer(torch.optim.AdamW)),
    'FocalLoss': partial(net, loss_func=lambda t: t.FocalLoss()), 'WeightedPerSampleLoss': partial(net, cbs=weighted),
    **{o: partial(net, cbs=lambda t,o=o,a=a: getattr(t, o)(*a)) for o,*a in
       (('ShowGraph',), ('SaveModel',), ('PredictionDynamics',), ('BatchSubsampler',0.75,0.75), ('MixUp1d',), ('CutMix1d',),
        ('BatchLossFilter',0.8), ('RandomWeightLossWrapper',), ('BatchMasker',))},
    'save_all, load_all': partial(net, more=lambda t,learn: last(learn.save_all('all'), t.load_all('all').get_preds()[0])),
    'MultiInputNet, series and a table': multi_input, 'feature_importance, step_importance': partial(net, more=importance),
    'calibrate_model': partial(net, classes=2, more=lambda t,learn: learn.calibrate_model(show_plot=False, verbose=False, max_iter=50)),
    **{k: partial(ts, arch=k, **v) for k,v in dict(xresnet1d18plus={}, OmniScaleCNN={}, TCN=dict(layers=[8,8]), mWDN=dict(levels=2, nf=4),
        MGRU_FCN=dict(conv_layers=[4,8,4], hidden_size=8), TSSequencerPlus=flat, gMLP=dict(flat, d_ffn=32), HydraPlus=dict(k=2, g=4),
        LSTMAttention=dict(hidden_size=8, encoder_layers=1, n_heads=2, d_ff=16), MultiRocketPlus=dict(num_features=1000)).items()}}

# %% fastxtend
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

def images(n=40, size=16):
    "Images of noise, with a bar whose place and color depend on the class"
    x = np.random.default_rng(0).integers(0, 80, (n,size,size,3)).astype('uint8')
    for i in range(n): x[i,:,i%3*5:i%3*5+5,i%3] += 150
    block = DataBlock((ImageBlock,CategoryBlock), get_x=lambda i: x[i], get_y=lambda i: 'abc'[i%3], splitter=IndexSplitter(range(n-16, n)),
                      batch_tfms=[*aug_transforms(size=(size,size)), Normalize.from_stats(*imagenet_stats)])
    return block.dataloaders(range(n), bs=8, num_workers=0)
def cnn(x): return nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), PoolFlatten(), nn.Linear(16, 3))

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
libraries = {'tsai':(tsai,of_ts), 'fastxtend as it is':(fastxtend,of_fx), 'fastxtend with three old names put back':(fastxtend_old,of_old)}

# %% run the programs
def forked(f, *args, limit=None):
    "Calls `f` in a fork of this process; returns `None` if it crashes or takes more than `limit` seconds"
    fork = multiprocessing.get_context('fork')
    here,there = fork.Pipe(duplex=False)
    p = fork.Process(target=lambda: there.send(f(*args)))
    p.start(); there.close()
    try: return here.recv() if here.poll(limit) else None
    except EOFError: return None
    finally: p.kill(); p.join()

def one(flow, of, how):
    "The result of a program, or its error"
    from IPython.core.interactiveshell import InteractiveShell
    InteractiveShell.instance() # some of tsai's callbacks draw in a notebook
    set_seed(0)
    if 'tsai.utils' in sys.modules: sys.modules['tsai.utils'].rng = np.random.default_rng(0) # tsai has its own random generator
    learners = []
    def to(learn):
        learners.append(learn.add_cb(Steps()))
        return getattr(learn, how)() if how else learn
    try:
        with tempfile.TemporaryDirectory() as d, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            os.chdir(d)
            res = flow(to, of)
        if not all(map(math.isfinite, res['losses']+res['preds'])): raise FloatingPointError('a loss or a prediction is not finite')
    except Exception as e: return dict(error=re.sub(r'(?<!\w)/\S*/', '', ' '.join(f'{type(e).__name__}: {e}'.split()))[:200]) # no paths
    mps = [o.mixed_precision for o in learners if how and hasattr(o, 'mixed_precision')]
    return dict(res, reruns=sum(o.n_rerun for o in mps), skipped=sum(o.n_skipped for o in mps), kept=sum(len(o.promoted) for o in mps))

def apart(res, plain):
    "The counts of a run, and the largest difference of its losses (relative) and predictions from the unchanged run"
    if 'error' in res or 'error' in plain: return {k:v for k,v in res.items() if k not in ('losses','preds')}
    if any(len(res[k])!=len(plain[k]) for k in ('losses','preds')): return dict(error='has other numbers of losses or predictions')
    losses,preds = [np.subtract(res[k], plain[k]) for k in ('losses','preds')]
    return dict(res, **{k: float(f'{abs(v).max():.3g}') for k,v in dict(losses=losses/plain['losses'], preds=preds).items()})

def run(library, make, flows, limit):
    "The rows of a library. It is imported here, in a process of its own, since it changes fastai"
    of,found = make(),{}
    for c,how in contenders.items():
        if how: import fastai_amp16.all # noqa: F401 (not earlier: unchanged programs run without it)
        for o,f in flows.items(): found[o,c] = forked(one, f, of, how, limit=limit) or dict(error=f'crashed, or not done in {limit:g} s')
    return [dict(library=library, flow=o, **{c: apart(found[o,c], found[o,'plain']) for c in contenders}) for o in flows]

# %% the result
def ran(rows, c): return [r[c] for r in rows if 'error' not in r['plain'] and 'error' not in r[c]]
def furthest(rows, c): return f"{100*max((o['losses'] for o in ran(rows, c)), default=math.nan):.2g}%"
def claim(rows):
    "How many programs run in half precision, and how far their losses are from fp32, in a sentence"
    (n,far),(n_bf16,far_bf16) = ((len(ran(rows, c)),furthest(rows, c)) for c in ('fp16','bf16'))
    return (f"Of {len(ran(rows, 'plain'))} programs that run unchanged, {n} also run with `to_fp16_dynamic`, with losses within {far} of "
            f"those in fp32, and {n_bf16} with `to_bf16_dynamic`, within {far_bf16}")
def table(res):
    "A Markdown table with a row for each library. Differences of losses are relative to those of the unchanged program"
    def line(library):
        rows = [r for r in res['rows'] if r['library']==library]
        counts = ' | '.join(str(len(o)) for o in (rows,*(ran(rows, c) for c in contenders)))
        name = library.replace(' as it is', ', unchanged').replace(' with three old names put back', ', three removed names restored')
        return f"| {name} | {res['libraries'][library.split()[0]]} | {counts} | {furthest(rows, 'fp16')} | {furthest(rows, 'bf16')} |"
    head = ['library','version','programs','run unchanged','run with `to_fp16_dynamic`','run with `to_bf16_dynamic`',
            'largest difference of a loss, fp16','largest difference of a loss, bf16']
    lines = map(line, dict.fromkeys(r['library'] for r in res['rows']))
    return '\n'.join([f"| {' | '.join(head)} |", '| --- | --- |'+' --: |'*6, *lines])
def failing(res):
    "Markdown: programs that run unchanged and fail in half precision"
    rows = [(r,c) for r in res['rows'] for c in contenders if 'error' in r[c] and 'error' not in r['plain']]
    return '\n'.join(f"- {r['flow']} ({r['library']}), with `{contenders[c]}`: {r[c]['error']}" for r,c in rows)

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--only', nargs='*', default=[], help='parts of the names of libraries or programs')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    p.add_argument('--limit', type=float, default=300, help='timeout in seconds for a program in one precision')
    a = p.parse_args(argv)
    have = {o: importlib.metadata.version(o) for o in ('tsai','fastxtend') if importlib.util.find_spec(o)}
    if not have: p.error('neither tsai nor fastxtend is installed')
    res = dict(machine=machine(), fastai=fastai.__version__, libraries=have, rows=[])
    for library,(make,flows) in libraries.items():
        some = {k:v for k,v in flows.items() if not a.only or any(o in f'{library}: {k}' for o in a.only)}
        if some and library.split()[0] in have: res['rows'] += forked(run, library, make, some, a.limit)
    print(table(res), failing(res), sep='\n\n')
    a.out.write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__': main()
