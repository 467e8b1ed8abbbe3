"Small, realistic trainings, on data that comes with scikit-learn; all of them work well in fp32"
import warnings
from collections import namedtuple
from functools import cache,partial
from importlib.resources import files
import torch
import torch.nn.functional as F
with warnings.catch_warnings(): # deprecation warnings of PyTorch and pandas
    warnings.simplefilter('ignore')
    from fastai.tabular.all import *
    from fastai.callback.rnn import rnn_cbs
    from fastai.collab import EmbeddingNN
    from fastai.text.data import LMDataLoader
    from fastai.text.models.awdlstm import AWD_LSTM,awd_lstm_lm_config
    from fastai.text.models.core import get_language_model
from sklearn.datasets import load_breast_cancer,load_diabetes,load_digits
from fastai_amp16.all import AdamW16,GradientNormClip
from fastai_amp16.demo import RegNetY,digits_dls,small_cnn
from benchmarks.shared import hostile

Training = namedtuple('Training', 'make epochs lr') # for `make(seed).fit_one_cycle(epochs, lr)`; the first metric is at most 1

def learner(*args, clip=False, **kwargs):
    "`hostile.learner` on the default device; with `clip`, gradients are clipped"
    learn = hostile.learner(*args, **kwargs)
    learn.dls.to(default_device())
    return learn.add_cb(GradientNormClip(1.)) if clip else learn

# %% images
many = dict(n=1437, n_valid=360, bs=64)
def digits(n):
    "`n` of 1797 images of 1x8x8 pixels, with mean 0 and standard deviation 1, and their classes"
    x,y = [torch.tensor(o) for o in load_digits(return_X_y=True)]
    x,idxs = (x-x.mean())/x.std(),torch.randperm(len(x))[:n]
    return x.float().view(-1, 1, 8, 8)[idxs],y[idxs]

def vision(model, seed, counts=False):
    set_seed(seed, reproducible=True)
    return Learner(digits_dls(seed=seed, counts=counts), model(), opt_func=AdamW16, metrics=accuracy, cbs=GradientNormClip(1.))

class UNet(nn.Module):
    def __init__(self, nf=12):
        super().__init__()
        self.stem,self.down = ConvLayer(1, nf),nn.Sequential(ConvLayer(nf, 2*nf, stride=2), ConvLayer(2*nf, 2*nf))
        self.up,self.out = PixelShuffle_ICNR(2*nf, nf),nn.Sequential(ConvLayer(2*nf, nf), nn.Conv2d(nf, 1, 1))
    def forward(self, x):
        s = self.stem(x)
        return self.out(torch.cat([s, self.up(self.down(s))], dim=1))

def unet(seed):
    def noisy(n):
        x = digits(n)[0]
        return x+0.7*torch.randn_like(x),x
    return learner(seed, noisy, UNet, MSELossFlat(), hostile.r2, **many)

class Halves(nn.Module):
    "Scores how well each left half of an image matches each right half in the batch, as CLIP does for images and captions"
    def __init__(self):
        super().__init__()
        def encoder(): return nn.Sequential(nn.Flatten(), nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 32))
        self.left,self.right,self.log_scale = encoder(),encoder(),nn.Parameter(torch.tensor(2.))
    def forward(self, x):
        l,r = x.chunk(2, dim=-1)
        return self.log_scale.exp()*F.normalize(self.left(l), dim=-1)@F.normalize(self.right(r), dim=-1).T

def _own(p): return torch.arange(len(p), device=p.device)
def contrast(p, _): return (F.cross_entropy(p, _own(p))+F.cross_entropy(p.T, _own(p)))/2
def retrieval(p, _): return accuracy(p, _own(p))

def halves(seed): return learner(seed, digits, Halves, contrast, retrieval, **many)

# %% transformers
class Transformer(nn.Module):
    "A transformer on `n` tokens of size `d` that `embed` makes: classifies their mean or, if `causal`, each token"
    def __init__(self, embed, n, c, d=32, depth=2, causal=False):
        super().__init__()
        self.embed,self.pos = embed,nn.Parameter(torch.randn(n, d)*0.1)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(d, 4, 2*d, 0., batch_first=True, norm_first=True) for _ in range(depth)])
        self.norm,self.head = nn.LayerNorm(d),nn.Linear(d, c)
        self.register_buffer('mask', nn.Transformer.generate_square_subsequent_mask(n) if causal else None)
    def forward(self, x):
        x,causal = self.embed(x)+self.pos,self.mask is not None
        for block in self.blocks: x = block(x, self.mask, is_causal=causal)
        return self.head(self.norm(x if causal else x.mean(1)))

def patches(d=32): return nn.Sequential(nn.Conv2d(1, d, 2, 2), nn.Flatten(2), Lambda(partial(torch.transpose, dim0=1, dim1=2)))
def vit(seed): return learner(seed, digits, lambda: Transformer(patches(), 16, 10), **many, clip=True)

# %% text
@cache
def text():
    "scikit-learn's descriptions of its datasets, with each character as a number, and the number of different characters"
    docs = sorted((o for o in files('sklearn.datasets.descr').iterdir() if o.name.endswith('.rst')), key=lambda o: o.name)
    s = ' '.join(' '.join(o.read_text(encoding='utf8').split()) for o in docs)
    vocab = {o: i for i,o in enumerate(sorted(set(s)))}
    return torch.tensor([vocab[o] for o in s]),len(vocab)

def passages(n, length):
    "`n` passages of the text, in random order"
    ids = text()[0]
    ids = ids[:len(ids)//length*length].view(-1, length)
    return ids[torch.randperm(len(ids))[:n]]

def transformer(seed, length=32):
    def data(n): return (ids := passages(n, length+1))[:,:-1],ids[:,1:]
    def model(): return Transformer(Embedding(text()[1], 32, std=0.1), length, text()[1], causal=True)
    return learner(seed, data, model, CrossEntropyLossFlat(), n=1000, n_valid=200, bs=16, clip=True)

def awd_lstm(seed):
    set_seed(seed, reproducible=True)
    docs = [(o,) for o in passages(120, 300)]
    train,valid = LMDataLoader(docs[:100], bs=16, seq_len=32, shuffle=True),LMDataLoader(docs[100:], bs=16, seq_len=32)
    model = get_language_model(AWD_LSTM, text()[1], {**awd_lstm_lm_config, 'emb_sz': 48, 'n_hid': 96, 'n_layers': 2}, drop_mult=0.3)
    dls,cbs = DataLoaders(train, valid, device=default_device()),[*rnn_cbs(2., 1.), GradientNormClip(1.)]
    return Learner(dls, model, CrossEntropyLossFlat(), AdamW16, metrics=accuracy, cbs=cbs)

# %% tables
def tabular(load, block, metric, seed, **kwargs):
    "A tabular learner: columns with few values are categories, all others are numbers"
    set_seed(seed, reproducible=True)
    df = load(as_frame=True).frame
    cats = [o for o in df.columns[:-1] if df[o].nunique()<10]
    conts = [o for o in df.columns[:-1] if o not in cats]
    to = TabularPandas(df, [Categorify,Normalize], cats, conts, 'target', block, RandomSplitter(0.4)(df))
    return tabular_learner(to.dataloaders(16, val_bs=len(to.valid)), [64,32], opt_func=AdamW16, metrics=metric, **kwargs)

def classification(seed): return tabular(load_breast_cancer, CategoryBlock(), accuracy, seed)
def regression(seed): return tabular(partial(load_diabetes, scaled=False), RegressionBlock(), hostile.r2, seed, y_range=(0,400))

def ratings(seed, n_factors=8, n_users=400):
    "Collaborative filtering with images as users, pixels as items, and the values of the pixels as ratings from 0 to 16"
    def data(n):
        x = torch.tensor(load_digits().data[:n_users]).float()
        pairs = torch.cartesian_prod(torch.arange(n_users), torch.arange(64))[torch.randperm(n_users*64)[:n]]
        return pairs,x[pairs[:,:1],pairs[:,1:]]
    model = partial(EmbeddingNN, [(n_users,n_factors),(64,n_factors)], [64,32], y_range=(0,16.5))
    return learner(seed, data, model, MSELossFlat(), hostile.r2, n=20000, n_valid=5000, bs=256)

trainings = {
    'CNN with batch norms': Training(partial(vision, small_cnn), 4, 5e-3),
    'RegNetY with Squeeze-and-Excitation': Training(partial(vision, RegNetY), 4, 1e-2),
    'RegNetY on raw counts': Training(partial(vision, RegNetY, counts=True), 6, 1e-2),
    'denoising U-Net': Training(unet, 4, 1e-2),
    'vision transformer': Training(vit, 6, 3e-3),
    'contrastive pairs': Training(halves, 16, 3e-3),
    'transformer on characters': Training(transformer, 5, 1e-2),
    'AWD-LSTM on characters': Training(awd_lstm, 8, 1e-2),
    'tabular classification': Training(classification, 6, 1e-2),
    'tabular regression': Training(regression, 10, 1e-2),
    'collaborative filtering': Training(ratings, 8, 1e-2)}
