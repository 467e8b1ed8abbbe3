"Two real processes that train together by fastai's `distrib_ctx`, over gloo on a CPU"
import os
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
import pytest,torch
import torch.distributed as dist
from fastai.basics import partial,Callback,DataLoader,DataLoaders,Learner,nn,set_seed
from common import *

def _worker(rank, path, f, args):
    "Run `f` as process `rank` of two"
    from accelerate.state import AcceleratorState
    from fastai.distributed import DistributedDL
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', ACCELERATE_USE_CPU='1')
    def _broadcast(self, t, rank): # fastai's own calls `.cuda()`
        t = torch.tensor(t)
        dist.broadcast(t, rank)
        return t.tolist()
    DistributedDL._broadcast = _broadcast
    dist.init_process_group('gloo', init_method=f'file://{path}', rank=rank, world_size=2, timeout=timedelta(seconds=30))
    try: return f(rank, *args)
    finally:
        AcceleratorState._reset_state(True)
        dist.destroy_process_group()

class Ranks:
    "Two processes that live on from test to test"
    pools = None
    def __call__(self, f, *args, path):
        self.pools = self.pools or [ProcessPoolExecutor(1, get_context('spawn')) for _ in range(2)]
        futures = [p.submit(_worker, i, path/'store', f, args) for i,p in enumerate(self.pools)]
        return [o.result(60) for o in futures]
    def end(self):
        for p in self.pools or (): p.shutdown(wait=False, cancel_futures=True)
        self.pools = None

@pytest.fixture(scope='session')
def _ranks():
    ranks = Ranks()
    yield ranks
    ranks.end()

@pytest.fixture
def ranks(_ranks, tmp_path): return partial(_ranks, path=tmp_path)

class Grads(Callback):
    "The gradients that each step is taken with, the weights after it, and the batches"
    order = 50
    def before_fit(self): self.grads,self.weights,self.batches = [],[],[]
    def before_batch(self):
        if self.training: self.batches.append((*self.xb,*self.yb))
    def before_step(self): self.grads.append([p.grad.clone() for p in self.model.parameters()])
    def after_batch(self):
        if self.training: self.weights.append(weights(self))

def gathered(o):
    res = [None]*2
    dist.all_gather_object(res, o)
    return res

def same(o):
    "Both ranks have the same `o`"
    a,b = gathered(o)
    if isinstance(a, list) and a and isinstance(a[0], torch.Tensor): assert equal(a, b)
    else: assert a==b, (a, b)
    return o

def train(rank, n=2, cbs=(), sync_bn=False, lr=None, trainer=None, to='to_fp16_dynamic', mp={}, **kwargs):
    "A fit on two ranks; whatever happens in it, all that must be the same on both is"
    learn = getattr(learner(**kwargs), to)(**mp)
    with learn.distrib_ctx(sync_bn=sync_bn, **trainer or {}): fit(learn, n, lr, cbs=[*cbs, (g := Grads())])
    agreed(learn)
    for w in g.weights: same(w)
    return learn,g

def agreed(learn):
    clean(learn)
    mp = learn.mixed_precision
    same(weights(learn))
    same((str(mp.history), mp.skipped, mp.scaler.state_dict(), mp.promoted, [r.sentence for r in mp.reports]))

def ln_mlp(): return nn.Sequential(nn.Linear(8,16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16,1))

def _as_one_process(rank):
    learn,g = train(rank, model=ln_mlp)
    joined = [tuple(torch.cat(ts) for ts in zip(*bs)) for bs in zip(*gathered(g.batches))]
    one = learner(ln_mlp).to_fp16_dynamic()
    one.dls = DataLoaders(DataLoader(joined[:2], bs=None), DataLoader(joined[:1], bs=None))
    def more(): one.dls = DataLoaders(DataLoader(joined[2:], bs=None), DataLoader(joined[:1], bs=None))
    fit(one, 1, cbs=(h := Grads()))
    hs = h.grads
    more()
    fit(one, 1, cbs=(h := Grads()))
    assert len(g.grads)==len(hs+h.grads)==4
    for gs,ref in zip(g.grads, hs+h.grads):
        for a,b in zip(gs, ref): torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3*max(b.norm().item(), 1e-3))
    torch.testing.assert_close(learn.mixed_precision.history.grad_norm.values, one.mixed_precision.history.grad_norm.values, rtol=2e-3, atol=0)

def test_gradients_are_those_of_one_process_on_the_joined_batch(ranks): ranks(_as_one_process)

def _one_overflows(rank, where, sync):
    learn,g = train(rank, model=mlp, cbs=[Poison({1,2} if where=='backward' else {1}, where)] if rank else [], lr=1e-2)
    mp = learn.mixed_precision
    assert mp.history.skipped.tolist()==([False,True,True,False] if where=='backward' else [False,True,False,False])
    assert mp.scaler.get_scale()==(2**14 if where=='backward' else 2**16)
    assert all(v.isfinite().all() for v in learn.model.state_dict().values())

@pytest.mark.parametrize('where', ['forward','backward'])
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks, where): ranks(_one_overflows, where, False)
