"""What the programs of all libraries have in common: small data, a small network, and the result of a fit

A program is a function of `to`, which puts a learner into half precision or leaves it as it is, and of the names of a library."""
import importlib,types,warnings
import numpy as np,torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.vision.all import ( # noqa: F401 (some are for the programs)
        Adam,Callback,CategoryBlock,ConvLayer,CrossEntropyLossFlat,DataBlock,DataLoader,DataLoaders,ImageBlock,IndexSplitter,
        LabelSmoothingCrossEntropyFlat,Learner,Normalize,OptimWrapper,PoolFlatten,accuracy,aug_transforms,imagenet_stats,nn)

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

def images(n=40, size=16):
    "Images of noise, with a bar whose place and color depend on the class"
    x = np.random.default_rng(0).integers(0, 80, (n,size,size,3)).astype('uint8')
    for i in range(n): x[i,:,i%3*5:i%3*5+5,i%3] += 150
    block = DataBlock((ImageBlock,CategoryBlock), get_x=lambda i: x[i], get_y=lambda i: 'abc'[i%3], splitter=IndexSplitter(range(n-16, n)),
                      batch_tfms=[*aug_transforms(size=(size,size)), Normalize.from_stats(*imagenet_stats)])
    return block.dataloaders(range(n), bs=8, num_workers=0)
def cnn(x): return nn.Sequential(ConvLayer(3, 8, stride=2), ConvLayer(8, 16, stride=2), PoolFlatten(), nn.Linear(16, 3))

def split(items, bs, n=16):
    "Loaders of `items`, without shuffling; the last `n` are the validation set"
    return DataLoaders(*(DataLoader(o, bs=bs, num_workers=0) for o in (items[:-n],items[-n:])))
def rows(n=80, inputs=8, bs=8):
    "Rows of numbers, of three classes"
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, inputs, generator=g)
    items = [*zip(x, x[:,:3].argmax(1))]
    return split(items, bs)
def mlp(): return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
