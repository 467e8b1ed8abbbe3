"Ordinary models of fastai and PyTorch, most of them with dropout, of which nothing is to be said"
import pytest,torch
import torch.nn.functional as F
from fastai.basics import CrossEntropyLossFlat,DataLoader,DataLoaders,Learner,default_device,nn,set_seed
from fastai.callback.rnn import rnn_cbs
from fastai.tabular.model import TabularModel
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import get_text_classifier
from fastai.vision.learner import create_head
from torchvision.models import VisionTransformer
from fastai_amp16.all import AdamW16
from common import clean,fit,in_turn

class Encoder(nn.Module):
    "PyTorch's, over the rows of an image"
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.inp,self.body,self.out = nn.Linear(16, 16),nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),nn.Linear(16, 4)
    def forward(self, x): return self.out(self.body(self.inp(x[:,0])).mean(1))

class Attention(nn.Module):
    "Of a program's own, by the fused kernel, over the rows of an image"
    def __init__(self):
        super().__init__()
        self.qkv,self.out = nn.Linear(16, 48),nn.Linear(16, 4)
    def forward(self, x):
        q,k,v = self.qkv(x).unflatten(-1, (6,8)).transpose(1, 3)[:,:,:,0].chunk(3, 1)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2*self.training)
        return self.out(h.transpose(1, 2).flatten(2).mean(1))

class Rows(nn.Module):
    "The rows of an image, one after the other"
    def __init__(self, rnn, **kwargs):
        super().__init__()
        self.rnn,self.out = rnn(16, 16, batch_first=True, **kwargs),nn.Linear(16, 4)
    def forward(self, x): return self.out(self.rnn(x[:,0])[0][:,-1])

def headed():
    body = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
    return nn.Sequential(body, create_head(16, 4, lin_ftrs=[32]))

def vit(): return VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=4, dropout=0.1, attention_dropout=0.1)

def classifier():
    sizes,ps = dict(emb_sz=16, n_hid=16, n_layers=2),dict(output_p=0.4, hidden_p=0.3, input_p=0.4, embed_p=0.05, weight_p=0.4)
    config = dict(pad_token=1, bidir=False, **sizes, **ps)
    return get_text_classifier(AWD_LSTM, 40, 4, seq_len=16, config=config, lin_ftrs=[16])

def images(n):
    "Of four kinds: where it is bright"
    y = torch.randint(4, (n,))
    x = torch.randn(n, 1, 16, 16)
    for i,o in enumerate(y): x[i,0,4*o:4*o+4] += 1.
    return x,y
def rgb(n):
    x,y = images(n)
    return x.expand(-1, 3, -1, -1).contiguous(),y
def texts(n):
    "Of four kinds: words of one kind are more frequent"
    y = torch.randint(4, (n,))
    kind = torch.where(torch.rand(n, 24)<0.6, y[:,None], torch.randint(4, (n,24)))
    return 4+9*kind+torch.randint(9, (n,24)),y
def rows(n):
    "A category, and four numbers"
    y,x = torch.randint(4, (n,)),torch.randn(n, 4)
    x[torch.arange(n),y] += 2.
    return y[:,None]//2,x,y

models = { # inputs and targets, model
    'head': (images, headed), 'tabular': (rows, lambda: TabularModel([(2,2)], 4, 4, [32,16], ps=[0.1,0.2], embed_p=0.1)),
    'encoder': (images, Encoder), 'attention': (images, Attention), 'vit': (rgb, vit), 'awd_lstm': (texts, classifier),
    'lstm': (images, lambda: Rows(nn.LSTM, num_layers=2, dropout=0.3)), 'gru': (images, lambda: Rows(nn.GRU)),
    'rnn': (images, lambda: Rows(nn.RNN)),
}

def learner(data, model, n=96, bs=8, **kwargs):
    set_seed(0, reproducible=True)
    items = list(zip(*data(n+32)))
    dls = DataLoaders(DataLoader(items[:n], bs=bs, shuffle=True), DataLoader(items[n:], bs=32), device=default_device())
    return Learner(dls, model(), CrossEntropyLossFlat(), AdamW16, lr=1e-3, **kwargs)

def make(name, **kwargs): return learner(*models[name], cbs=rnn_cbs() if name=='awd_lstm' else (), **kwargs)

@pytest.mark.filterwarnings('error::UserWarning','ignore:On a CPU, convolutions')
@in_turn(models)
def test_nothing_is_said(name, to, dtype):
    "Nor does a batch run again, although three of them are compared with fp32"
    learn = getattr(make(name), to)(**dict(init_scale=2.**8) if dtype==torch.float16 else {})
    mp = fit(learn).mixed_precision
    assert len(mp.history)==24 and not mp.reports and not mp.promoted and mp.n_rerun==mp.n_skipped==0
    clean(learn)
