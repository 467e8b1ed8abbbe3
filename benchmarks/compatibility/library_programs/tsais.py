"Programs of tsai: trainings of series, its callbacks, losses, exports and architectures"
from functools import partial
import numpy as np,pandas as pd,torch
from benchmarks.compatibility.library_programs.common import fitted,last,lr_find,names

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
