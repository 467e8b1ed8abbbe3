"Two real processes that train together by fastai's `distrib_ctx`, over gloo on a CPU"
import os,re,runpy,signal,socket,subprocess,sys,time,warnings
from contextlib import contextmanager,redirect_stdout
from io import StringIO
from pathlib import Path
import pytest,torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.nn.functional import all_gather,all_reduce
from torch.nn.parallel import DistributedDataParallel
from accelerate import DDPCommunicationHookType,DistributedDataParallelKwargs
from fastcore.nbio import read_nb
from fastai.basics import SGD,Callback,DataLoader,DataLoaders,nn
from fastai.callback.all import GradientAccumulation,GradientClip,SaveModelCallback,TerminateOnNaNCallback
from fastai_amp16.all import GradientNormClip
from fastai_amp16.learner import looking
from fastai_amp16.train import ranks as ranks_module
from common import *
from processes import Processes,timeout

pytestmark = pytest.mark.cpu_only('processes over gloo')

@contextmanager
def accelerated(rank):
    "What Accelerate and fastai need to run on CPUs"
    from accelerate.state import AcceleratorState
    from fastai.distributed import DistributedDL
    default_device(False)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', ACCELERATE_USE_CPU='1')
    def _broadcast(self, t, rank): # fastai's own calls `.cuda()`
        t = torch.tensor(t)
        dist.broadcast(t, rank)
        return t.tolist()
    DistributedDL._broadcast = _broadcast
    try: yield
    finally: AcceleratorState._reset_state(True)

@pytest.fixture(scope='session')
def ranks():
    ranks = Processes(accelerated)
    yield ranks
    ranks.end()

class Grads(Callback):
    "The gradients that each step is taken with, the weights after it, and the batches"
    order = 50
    def before_fit(self): self.grads,self.after,self.seen = [],[],[]
    def before_batch(self):
        if self.training: self.seen.append((*self.xb,*self.yb))
    def before_step(self): self.grads.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
    def after_batch(self):
        if self.training: self.after.append(weights(self))

def gathered(o):
    res = [None]*2
    dist.all_gather_object(res, o)
    return res

def same(o):
    "Both ranks have the same `o`; tensors bit for bit"
    a,b = gathered(o)
    if isinstance(a, list) and a and isinstance(a[0], torch.Tensor): assert equal(a, b)
    else: assert a==b, (a, b)
    return o

def agreed(learn, reports=True):
    clean(learn)
    mp = learn.mixed_precision
    same(weights(learn))
    sentences = [r.sentence for r in mp.reports] if reports else []
    same((str(mp.history), mp.n_skipped, mp.n_rerun, mp.scaler.state_dict(), mp.promoted, sentences))

def together(learn, epochs, cbs, sync_bn=False, ddp=None):
    "A fit on two ranks, after which gradients and weights must be the same on both, at each step; its `Grads`"
    handlers = [DistributedDataParallelKwargs(**ddp or {})]
    with learn.distrib_ctx(sync_bn=sync_bn, kwargs_handlers=handlers): fit(learn, epochs, cbs=[*cbs, (g := Grads())])
    same([t for ts in g.grads+g.after for t in ts])
    return g

def train(rank, epochs=2, cbs=(), sync_bn=False, ddp=None, mp=None, **kwargs):
    "A fit in mixed precision on two ranks, after which all that must be the same on both is; the learner and its `Grads`"
    learn = learner(**kwargs).to_fp16_dynamic(**mp or {})
    g = together(learn, epochs, cbs, sync_bn, ddp)
    agreed(learn)
    return learn,g

def steps_of_fp32(rank, epochs=3, cbs=lambda: (), sync_bn=False, ddp=None, mp=None, **kwargs):
    "A fit whose steps are those of fastai alone in fp32, each gradient to within the roundings of fp16; the learner"
    kwargs = dict(opt_func=SGD, lr=0.1, **kwargs) # the first steps of Adam ask for no more than the signs of tiny gradients
    learn,g = train(rank, epochs, [*cbs(), GradientClip(0.1)], sync_bn, ddp, mp, **kwargs)
    close(g.grads, together(learner(**kwargs), epochs, [*cbs(), GradientClip(0.1)], sync_bn, ddp).grads, 0.02)
    return learn

def ran_again(learn, at, n_steps):
    "The steps `at` ran again and no other did, and none was skipped"
    h = learn.mixed_precision.history
    assert len(h)==n_steps and not h.skipped.any() and h.step[h.reruns>0].tolist()==list(at), str(h)

def _cat(batches): return tuple(torch.cat(ts) for ts in zip(*batches))

def as_one_process(g, model, n_acc=1):
    "A learner in one process, fitted to the joined batches, and its gradients"
    joined = [_cat(bs) for bs in zip(*gathered(g.seen))]
    joined = [_cat(joined[i:i+n_acc]) for i in range(0, len(joined), n_acc)]
    one = learner(model).to_fp16_dynamic()
    one.dls = DataLoaders(DataLoader(joined, bs=None), DataLoader(joined[:1], bs=None))
    fit(one, 1, cbs=(h := Grads()))
    return one,h.grads

def close(grads, refs, rtol=4e-3):
    "Each gradient, all parameters together, to within a few roundings of fp16"
    assert len(grads)==len(refs)
    for gs,rs in zip(grads, refs):
        a,b = [torch.cat([t.flatten() for t in ts]) for ts in (gs,rs)]
        assert (a-b).norm()<rtol*b.norm(), ((a-b).norm()/b.norm()).item()

def _sync_bn(self, x):
    "What CUDA's kernels do, of which there are none for CPUs"
    group = self.process_group or dist.group.WORLD
    if not self.training or group.size()==1:
        statistics = self.running_mean,self.running_var
        return nn.functional.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)
    self.num_batches_tracked.add_(1)
    n = len(x)*group.size()
    mean = all_reduce(x.sum(0), group=group)/n
    var = all_reduce((x-mean).square().sum(0), group=group)/n
    with torch.no_grad():
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(var*n/(n-1), self.momentum)
    return (x-mean)*(var+self.eps).rsqrt()*self.weight+self.bias

@contextmanager
def sync_bn_on_cpus():
    theirs = nn.SyncBatchNorm.forward,DistributedDataParallel._passing_sync_batchnorm_handle
    nn.SyncBatchNorm.forward,DistributedDataParallel._passing_sync_batchnorm_handle = _sync_bn,lambda self, module: None
    try: yield
    finally: nn.SyncBatchNorm.forward,DistributedDataParallel._passing_sync_batchnorm_handle = theirs

# smooth, since a ReLU may make another gradient of a rounding
def ln_mlp(): return nn.Sequential(nn.Linear(8,16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16,1))

def detour(): return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.Tanh(), Detour(), nn.Linear(16,1))

# Gradients

def _joined(rank, model, sync):
    with sync_bn_on_cpus():
        learn,g = train(rank, model=model, sync_bn=sync)
        one,refs = as_one_process(g, model)
    close(g.grads, refs)
    norms = [list(o.mixed_precision.history.grad_norm) for o in (learn,one)]
    torch.testing.assert_close(*norms, rtol=2e-3, atol=0)
    if not sync: return
    assert isinstance(learn.model[1], nn.SyncBatchNorm)
    for k in ('running_mean','running_var'):
        torch.testing.assert_close(same([getattr(learn.model[1], k)])[0], getattr(one.model[1], k), rtol=1e-2, atol=1e-3)

@pytest.mark.parametrize('model,sync', [(ln_mlp,False),(mlp,True)], ids=['layer norm','sync_bn'])
def test_gradients_are_those_of_one_process_on_the_joined_batch(ranks, model, sync): ranks(_joined, model, sync)

def _accumulates(rank):
    learn,g = train(rank, 4, model=ln_mlp, cbs=[GradientAccumulation(32)], bs=8)
    close(g.grads, as_one_process(g, ln_mlp, n_acc=4)[1])

def test_gradient_accumulation(ranks): ranks(_accumulates)

def _clips(rank, norm_type):
    "A batch that no precision could hold on one rank, and one that runs again on the other"
    clip = GradientNormClip(0.05, norm_type)
    learn,g = train(rank, model=detour, cbs=[clip, Poison({1}, 'backward') if rank else Poison({2}, 'precision')])
    assert len(same(clip.norms))==3 and max(clip.norms)>0.05
    if norm_type==2: assert clip.norms==[n for n in learn.mixed_precision.history.grad_norm if n<1]
    for gs in g.grads: assert torch.nn.utils.get_total_norm(gs, norm_type)<0.0501

@pytest.mark.parametrize('norm_type', [2.,3.])
def test_clips_by_the_same_norm(ranks, norm_type): ranks(_clips, norm_type)

class Hook(Callback):
    "What `DistributedDataParallel` compresses messages with"
    order = 50
    def before_train(self): self.names = [getattr(h, '__name__', str(h)) for h,_ in self.model._comm_hooks]

def ln_detour(): return nn.Sequential(nn.Linear(8,16), nn.LayerNorm(16), nn.Tanh(), Detour(), nn.Linear(16,1))

def _compresses(rank, name):
    "Rank 1 has batches that no precision could hold, and one that runs again"
    ddp = dict(comm_hook=DDPCommunicationHookType[name], comm_state_option=dict(start_powerSGD_iter=2) if name=='POWER_SGD' else {})
    cbs = [Poison({3,4}, 'backward'), Poison({6}, 'precision')] if rank else []
    learn,g = train(rank, 6, model=ln_detour, ddp=ddp, cbs=[hook := Hook(), *cbs])
    assert hook.names==[{'FP16':'fp16_compress_hook', 'POWER_SGD':'powerSGD_hook'}[name]]
    h = learn.mixed_precision.history
    assert h.skipped.tolist()==[i in (3,4) for i in range(12)] and h.reruns[6]>0 and not h.reruns[7:].any()
    if name=='FP16': close(g.grads[:3], as_one_process(g, ln_detour)[1][:3])

@pytest.mark.parametrize('name', ['FP16','POWER_SGD'])
def test_communication_hooks(ranks, name): ranks(_compresses, name)

def _sends_bf16(rank):
    hook,kwargs = Hook(),dict(opt_func=SGD, lr=0.1)
    learn = learner(**kwargs).to_bf16_dynamic()
    g = together(learn, 2, [hook], ddp=dict(comm_hook=DDPCommunicationHookType.BF16))
    agreed(learn)
    ran_again(learn, [], 4)
    assert hook.names==['bf16_compress_hook']
    close(g.grads, together(learner(**kwargs), 2, []).grads, 0.05)

def test_bf16_sends_bf16(ranks): ranks(_sends_bf16)

def line(): return nn.Sequential(nn.Linear(8,1))

def _compressed_overflow(rank):
    "The loss scale fits the backward pass, and not a message in fp16"
    learn,g = train(rank, 8, model=line, ddp=dict(comm_hook=DDPCommunicationHookType.FP16), mp=dict(keep_fp32='0', init_scale=2.**24))
    ran_again(learn, [0], 16)
    assert learn.mixed_precision.scaler.get_scale()<2**24

def test_what_a_message_in_fp16_cannot_hold_lowers_the_scale(ranks): ranks(_compressed_overflow)

class Unused(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b,self.detour = nn.Linear(8,16),nn.Linear(16,16),Detour()
    def forward(self, x): return self.detour(self.a(x)[:,:1])

def refuses(p, t):
    "A loss that tells of predictions that are not finite, as `torch.distributions` and `BCELoss` do"
    if not p.isfinite().all(): raise ValueError('not finite')
    return mse(p, t)

def _unused(rank):
    "Steps that are skipped, that run again, and that raise in the loss function"
    class Seen(Callback):
        order = 40
        def before_step(self):
            own = self.model.module
            assert all(p.grad is None for p in own.b.parameters()) and own.a.weight.grad is not None
    for loss_func in (None,refuses):
        cbs = [Poison({1}, 'backward'), Poison({2}, 'precision')] if rank or loss_func else []
        learn,g = train(rank, model=Unused, loss_func=loss_func, ddp=dict(find_unused_parameters=True), cbs=[Seen(), *cbs])
        h = learn.mixed_precision.history
        assert h.skipped.tolist()==[False,True,False,False] and h.reruns[2]>0 and learn.mixed_precision.promoted==['detour']

def test_find_unused_parameters(ranks): ranks(_unused)

def _static_graph(rank):
    def cbs(): return [Poison({0,3}, 'precision')] if rank else []
    ran_again(steps_of_fp32(rank, cbs=cbs, model=ln_detour, ddp=dict(static_graph=True)), [0], 6)

def test_a_first_batch_of_a_static_graph_runs_again(ranks): ranks(_static_graph)

def _sends(rank):
    "As many bytes a step as the page and the example say; 4 more in each attempt of a search, and for a batch of the validation"
    class Plain(Callback):
        "Gradients are sent by a call that can be counted"
        def before_train(self):
            if self.epoch==0: self.model.register_comm_hook(None, allreduce_hook)
    sizes,theirs = [],dist.all_reduce
    def counted(t, *args, **kwargs):
        sizes.append(t.nbytes)
        return theirs(t, *args, **kwargs)
    dist.all_reduce = counted
    try: learn,g = train(rank, 3, model=ln_mlp, cbs=[Plain()], mp=dict(init_scale=2.**20))
    finally: dist.all_reduce = theirs
    n = sum(p.numel() for p in learn.model.parameters())
    first,*others = learn.mixed_precision.history.reruns
    assert first>0 and not any(others)
    assert sizes==[4*n,16,4]*(first+1)+[4*n,16,4]+[4*n,16,4*n,16,4]*2

def test_bytes_of_a_step(ranks): ranks(_sends)

# A batch runs again on all ranks

def regular(): return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.Tanh(), dropout(0.2), Detour(), nn.Linear(16,1))

class Outlier(Callback):
    "Gradients of the batches `at` are a million times the usual"
    order = 5
    def __init__(self, at): self.at,self.i = at,-1
    def before_batch(self): self.i += self.training
    def before_backward(self):
        if self.i in self.at: self.learn.loss_grad = self.learn.loss_grad*2.**20

def _as_fp32(rank, which, sync):
    "Forward passes that overflow, and gradients, on some ranks: each step is that of fp32"
    def cbs(): return [Poison({1,4}, 'precision'), Outlier({6})] if rank in which else []
    with sync_bn_on_cpus(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        learn = steps_of_fp32(rank, 4, cbs, sync, model=regular, mp=dict(keep_fp32=lambda n,m: n=='5'))
    mp = learn.mixed_precision
    ran_again(learn, [1,6], 8)
    assert learn.model[1].num_batches_tracked==8 and mp.promoted==['4'] and mp.n_rerun<8 and mp.scaler.get_scale()<2**16
    told = same([str(w.message) for w in told if 'To start that way' in str(w.message)])
    faults = [r.sentence for r in mp.reports]
    assert len(told)==len(faults)==1 and "keep_fp32=['5', '4']" in told[0] and faults[0].startswith('On rank 1: ')==(which==[1])

@pytest.mark.parametrize('which,sync', [([1],True), pytest.param([1], False, marks=slow), ([0,1],False)], ids=['one, sync_bn','one','all'])
def test_a_batch_runs_again_on_all_ranks_and_takes_the_steps_of_fp32(ranks, which, sync): ranks(_as_fp32, which, sync)

def _first_scale(rank):
    "A scale that fits the gradients of rank 0, and not those of rank 1"
    learn = steps_of_fp32(rank, 4, lambda: [Outlier(range(8))] if rank else [], mp=dict(init_scale=2.**18))
    ran_again(learn, [0], 8)
    assert learn.mixed_precision.n_rerun<=7 and learn.mixed_precision.scaler.get_scale()<2**10

def test_a_first_scale_that_is_too_high_for_one_rank(ranks): ranks(_first_scale)

def _runs_accumulated_again(rank):
    "A forward pass that overflows in the first of four batches, on one rank; gradients that overflow, on the other"
    def cbs(): return [GradientAccumulation(32), Poison({4}, 'precision') if rank else Outlier({9})]
    learn = steps_of_fp32(rank, 4, cbs, model=regular, bs=8)
    ran_again(learn, [1,2], 4)
    assert learn.mixed_precision.promoted==['4'] and learn.model[1].num_batches_tracked==16

def test_accumulated_batches_run_again_on_all_ranks(ranks): ranks(_runs_accumulated_again)

class Gathers(nn.Module):
    "A contrastive loss: the predictions of all ranks, whose number and group it knows from before"
    def __init__(self): super().__init__(); self.n,self.group = dist.get_world_size(),dist.new_group([0,1])
    def forward(self, p, t):
        ps = [torch.empty_like(p) for _ in range(self.n)]
        dist.all_gather(ps, p.detach(), group=self.group)
        return mse(p, t)+mse(torch.cat(ps).mean(), torch.cat(all_gather(p, group=self.group)).mean())

class Own(nn.SyncBatchNorm):
    "In a group that it was told"
    def __init__(self): super().__init__(16, process_group=dist.group.WORLD)

def own_group(): return nn.Sequential(nn.Linear(8,16), Own(), nn.Tanh(), Detour(), nn.Linear(16,1))

def _one_is_looked_into(rank, gathers):
    "All run their batches, with collectives of the model or the loss function, as only one is at fault"
    model,loss_func = (detour,Gathers()) if gathers else (own_group,None)
    def cbs(): return [Poison({1,2,3}, 'precision')] if rank else []
    with sync_bn_on_cpus(): learn = steps_of_fp32(rank, 3, cbs, not gathers, model=model, loss_func=loss_func)
    ran_again(learn, [1], 6)
    assert learn.mixed_precision.promoted==['3'] and learn.mixed_precision.reports[0].sentence.startswith('On rank 1: ')

@pytest.mark.parametrize('gathers', [True,False], ids=['gathers','norm with a group'])
def test_all_look_together_at_a_fault_of_one_rank(ranks, gathers): ranks(_one_is_looked_into, gathers)

class Silent(nn.Module):
    "0 in half precision, where `on`"
    on = False
    def forward(self, x):
        y = x@torch.eye(x.shape[-1])
        return y if y.dtype==torch.float32 or not self.on else y*0

def silent(): return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.Tanh(), Silent(), nn.Linear(16,1))

class On(Callback):
    "Switches module 3 on"
    def before_fit(self): self.model[3].on = True

def _silent(rank, on_spiral):
    learn,g = train(rank, 10, model=silent, cbs=[On()] if rank else [], mp=dict(on_spiral=on_spiral))
    mp = learn.mixed_precision
    assert mp.promoted==(['3'] if on_spiral=='heal' else []) and mp.reports[0].sentence.startswith('On rank 1: ')
    assert mp.n_skipped==0 and mp.history.step[mp.history.reruns>0].tolist()==([0] if on_spiral=='heal' else [0,7])

@pytest.mark.parametrize('on_spiral', few(['heal','warn'], 'heal'))
def test_a_silent_failure_of_one_rank_is_a_matter_of_all(ranks, on_spiral): ranks(_silent, on_spiral)

class Coarse(nn.Module):
    "Where `on`: differs from fp32 in a validation, or in a moving average that it keeps for validations; or is chaotic"
    on = False
    def __init__(self, where): super().__init__(); self.where,self.mean = where,torch.full((16,), 9000.)
    def forward(self, x):
        if not self.on: return x
        if self.where=='carried':
            if not self.training: return x+9000-self.mean
            self.mean = 0.99*self.mean+0.01*(x.detach()+9000).mean(0)
        if self.where=='valid' and not self.training: return x+4000-4000
        return logistic(x.sigmoid()) if self.where=='chaos' and self.training else x

def logistic(h):
    for _ in range(12): h = 3.9*h*(1-h)
    return h

def _differs(rank, where, kept):
    def model(): return nn.Sequential(nn.Linear(8,16), nn.LayerNorm(16), Coarse(where), nn.Linear(16,1))
    class On(Callback):
        def before_fit(self): self.model[2].on = True
    learn,g = train(rank, 3, model=model, cbs=[On()] if rank else [])
    mp = learn.mixed_precision
    assert mp.promoted==kept and [r.sentence.startswith('On rank 1: ') for r in mp.reports]==[True]*len(kept) and mp.n_skipped==0
    assert mp.history.step[mp.history.reruns>0].tolist()==([] if where=='valid' else [0])

@pytest.mark.parametrize('where,kept', [('valid',['2']),('carried',['2']),('chaos',[])], ids=['valid','carried','chaos'])
def test_what_differs_from_fp32_on_one_rank_is_healed_on_all_unless_it_is_chaos(ranks, where, kept): ranks(_differs, where, kept)

def _few_samples(rank):
    "Statistics of two samples, or of four: no reason for a diagnosis"
    with sync_bn_on_cpus(): learn,g = train(rank, 10, bs=4, n=16, sync_bn=True)
    ran_again(learn, [], 20)
    assert not learn.mixed_precision.reports

def test_predictions_are_compared_on_all_ranks_together(ranks): ranks(_few_samples)

def _one_writes(rank):
    "All ranks or none, though a norm of all ranks is in the model"
    class Writes(Callback):
        def after_pred(self):
            if rank and self.training: self.model.module[0].weight.detach().mul_(1)
    with sync_bn_on_cpus(): learn,g = train(rank, 10, n=48, sync_bn=True, cbs=[Writes()])
    assert len(learn.mixed_precision.history)>16

def test_predictions_are_compared_together_if_one_rank_writes_to_weights(ranks): ranks(_one_writes)

class Always(Callback):
    "A fault in each batch of training, or of validation"
    def __init__(self, training): self.on_training = training
    def before_batch(self):
        for m in self.model.modules():
            if isinstance(m, Detour): m.on = self.training==self.on_training

def _validates(rank):
    "What overflows in a validation on one rank only"
    learn,g = train(rank, model=detour, cbs=[Always(training=False)] if rank else [])
    ran_again(learn, [], 4)
    assert learn.mixed_precision.promoted==['3'] and all(math.isfinite(v) for v in same(learn.recorder.values[-1]))

def test_a_validation_is_healed_on_all_ranks(ranks): ranks(_validates)

# Steps that all ranks skip

def _one_overflows(rank, where, sync, ddp):
    at = {1,2} if where=='backward' else {1}
    with sync_bn_on_cpus(): learn,g = train(rank, cbs=[Poison(at, where)] if rank else [], sync_bn=sync, ddp=ddp)
    assert learn.mixed_precision.history.skipped.tolist()==[i in at for i in range(4)]
    assert learn.mixed_precision.scaler.get_scale()==2**16
    assert all(v.isfinite().all() for v in learn.model.state_dict().values())
    assert learn.model[1].num_batches_tracked==4-len(at)
    if sync: same(list(learn.model.buffers()))
    # with `sync`, statistics are not finite on rank 0 either, which has nothing to do with it
    told = [(r.verdict,r.sentence[:11]) for r in learn.mixed_precision.reports]
    assert told==[('data' if where=='forward' else 'divergence','On rank 1: ')]*len(at)

@pytest.mark.parametrize('where,sync,ddp', [('backward',False,{}),('forward',True,{}),('forward',False,dict(broadcast_buffers=False))],
                         ids=['backward','sync_bn','norms of each rank'])
def test_what_fp32_could_not_hold_on_one_rank_either_is_skipped_by_all(ranks, where, sync, ddp): ranks(_one_overflows, where, sync, ddp)

def _skips_accumulated(rank):
    learn,g = train(rank, 4, cbs=[GradientAccumulation(32), *([Poison({5}, 'forward')] if rank else [])], bs=8)
    assert learn.mixed_precision.history.skipped.tolist()==[False,True,False,False]
    assert learn.mixed_precision.scaler.get_scale()==2**16 and learn.model[1].num_batches_tracked==12

def test_accumulated_batches_are_skipped_by_all(ranks): ranks(_skips_accumulated)

def _cannot_run_again(rank):
    "One rank writes to its weights within the batch"
    class Writes(Callback):
        def after_pred(self):
            with torch.no_grad(): self.model.module[0].weight.mul_(1)
    learn,g = train(rank, model=detour, cbs=[Poison({1}, 'precision'), *([Writes()] if rank else [])])
    assert learn.mixed_precision.history.skipped.tolist()==[False,True,False,False] and not learn.mixed_precision.promoted

def test_what_one_rank_cannot_run_again_is_skipped_by_all(ranks): ranks(_cannot_run_again)

class Broadcasts(nn.Module):
    "A factor that rank 0 draws for all"
    def forward(self, x):
        factor = torch.zeros(1)
        if dist.get_rank()==0: factor.uniform_(0.9, 1.1)
        dist.broadcast(factor, 0)
        return x/factor.to(x.dtype)

def broadcasts(): return nn.Sequential(nn.Linear(8,16), nn.LayerNorm(16), nn.Tanh(), Broadcasts(), Detour(), nn.Linear(16,1))

def _draws_together(rank, which):
    "What rank 0 sends to rank 1 is there in a diagnosis, too"
    learn,g = train(rank, 3, model=broadcasts, cbs=[Poison({1,2}, 'precision')] if rank in which else [])
    mp = learn.mixed_precision
    assert [r.verdict for r in mp.reports]==['forward'] and mp.promoted==['4'] and mp.n_skipped==0
    assert mp.reports[0].sentence.startswith('On rank 1: ')==(which==[1])

@pytest.mark.parametrize('which', [[1],[0,1]], ids=['one','all'])
def test_a_batch_for_which_one_rank_sends_what_it_draws(ranks, which): ranks(_draws_together, which)

def _two_faults(rank):
    "Each rank has a fault of its own: both are kept, and each is told of with its rank"
    class Turns(Callback):
        def before_batch(self): self.model.module[3+2*rank].on = self.training and self.train_iter==1
    def model(): return nn.Sequential(nn.Linear(8,16), nn.LayerNorm(16), nn.Tanh(), Detour(), nn.Linear(16,16), Detour(), nn.Linear(16,1))
    learn = steps_of_fp32(rank, 2, lambda: [Turns()], model=model)
    mp = learn.mixed_precision
    ran_again(learn, [1], 4)
    assert mp.promoted==['3','5'] and [r.producer for r in mp.reports]==['3','5']
    assert [r.sentence[:10] for r in mp.reports]==['On rank 0:','On rank 1:']

def test_each_rank_has_a_fault_of_its_own(ranks): ranks(_two_faults)

def _same_runs(rank):
    "What one rank keeps in fp32 in a run of a diagnosis, the other keeps as well, at the same scale"
    from fastai_amp16.diagnosis.case import Case
    theirs,runs = Case.run,[]
    def run(self, promoted=(), scale=None, **kwargs):
        runs.append((list(promoted), scale))
        return theirs(self, promoted, scale, **kwargs)
    Case.run = run
    try: learn,g = train(rank, model=ln_detour, cbs=[Poison({1}, 'precision')] if rank else [])
    finally: Case.run = theirs
    assert learn.mixed_precision.promoted==['3'] and len(same(runs))>2

def test_all_ranks_make_the_same_runs(ranks): ranks(_same_runs)

def _diagnosis_fails(rank):
    "A diagnosis that fails on one rank fails on all, and waits for nobody"
    from fastai_amp16.diagnosis import diagnose
    def broken(*args): raise IndexError('tuple index out of range')
    before = diagnose._table
    if rank: diagnose._table = broken
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter('always')
            learn,g = train(rank, 3, model=ln_detour, cbs=[Poison({1}, 'precision')])
    finally: diagnose._table = before
    ran_again(learn, [1], 6)
    told = same([str(w.message) for w in told if 'diagnosis failed' in str(w.message)])
    assert len(told)==1 and 'it raises IndexError (tuple index out of range). The batch runs in fp32 instead' in told[0]
    assert not learn.mixed_precision.promoted and not learn.mixed_precision.reports

def test_a_diagnosis_that_fails_on_one_rank(ranks): ranks(_diagnosis_fails)

class Total(nn.Module):
    "Counts in float64, where `on`"
    on,total = False,torch.zeros((), dtype=torch.float64)
    def forward(self, x):
        if self.on: self.total = self.total+x.detach().sum().double()
        return x

def totals(): return nn.Sequential(nn.Linear(8,16), nn.Identity(), nn.Linear(16,16), Total(), nn.Linear(16,1))

def _carries(rank):
    "One rank's modules carry what the other's do not"
    learn,g = train(rank, model=totals, cbs=[On(), Poison({2}, 'forward')] if rank else [])
    assert learn.mixed_precision.history.skipped.tolist()==[False,False,True,False] and learn.model[3].total.isfinite()

def test_what_modules_of_one_rank_carry(ranks): ranks(_carries)

def _told(rank, on_spiral):
    try: train(rank, 3, model=detour, cbs=[Poison({1}, 'precision')] if rank else [], mp=dict(on_spiral=on_spiral))
    except FloatingPointError as e: return str(e)

def test_raise_ends_all_ranks(ranks):
    for message in ranks(_told, 'raise'): assert 'On rank 1: ' in message and 'Detour' in message

def _diverges(rank):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        learn,g = train(rank, 20, cbs=[Poison(range(3,99), 'backward')] if rank else [])
    mp = learn.mixed_precision
    assert len(mp.history)==6 and mp.reports[-1].verdict=='divergence' and mp.reports[-1].sentence.startswith('On rank 1: ')
    assert sum('Training stopped at step 6 of 40' in o for o in same([str(w.message) for w in told if 'stopped' in str(w.message)]))==1

def test_divergence_ends_all_ranks(ranks): ranks(_diverges)

# Exceptions

class Raises(nn.Module):
    "Raises where it computes in half precision, if `on`"
    on = False
    def forward(self, x):
        if self.on and (x@torch.eye(x.shape[-1])).dtype!=torch.float32: raise ValueError('no half precision here')
        return x

def raising(): return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.Tanh(), Raises(), nn.Linear(16,1))

class Switch(Callback):
    "Switches `Raises` on in training batches whose number leaves the rest `at` when divided by `of`, or in validation"
    def __init__(self, on, valid=False, at=0, of=2): self.on,self.valid,self.at,self.of = on,valid,at,of
    def before_fit(self): self.recorder.train_metrics = True # which look at the predictions
    def before_batch(self):
        for m in self.model.modules():
            at = not self.training if self.valid else self.training and self.train_iter%self.of==self.at
            if isinstance(m, Raises): m.on = self.on and at

def _raises(rank, valid):
    "In the first of two batches that are accumulated, or in a validation"
    def cbs(): return [GradientAccumulation(16), TerminateOnNaNCallback(), Switch(True, valid)]
    learn = steps_of_fp32(rank, 3, cbs, model=raising, bs=8, metrics=mse)
    mp = learn.mixed_precision
    ran_again(learn, [] if valid else [0], 6)
    assert mp.promoted==['3'] and not mp.reports[0].sentence.startswith('On rank')

@pytest.mark.parametrize('valid', [False,True], ids=['train','valid'])
def test_what_raises_in_half_precision_on_all_ranks_is_healed(ranks, valid): ranks(_raises, valid)

def _raises_alone(rank):
    "It raises there, as in plain PyTorch, and nothing that the other sends is taken for something else"
    ranks_module._patience = 1
    learn,start = learner(raising).to_fp16_dynamic(),time.monotonic()
    with pytest.raises(ValueError if rank else RuntimeError, match='no half precision here' if rank else None):
        with learn.distrib_ctx(sync_bn=False): fit(learn, 2, cbs=[Switch(rank==1)])
    assert time.monotonic()-start<timeout and not learn.mixed_precision.reports
    clean(learn)

@pytest.mark.usefixtures('ranks') # they come from the same server
def test_what_raises_on_one_rank_alone_raises_there():
    "Processes of its own: the group is of no use afterwards"
    ranks = Processes(accelerated, timeout=6) # for so long, rank 0 waits
    try: ranks(_raises_alone)
    finally: ranks.end()

class Counts(nn.Module):
    "Has a buffer to send that no graph saves: with those of batch norms torch 2.6 raises at two calls, in fp32 as well"
    def __init__(self):
        super().__init__()
        self.register_buffer('n', torch.zeros(1))
    def forward(self, x):
        self.n += self.training
        return x

def counting(): return nn.Sequential(nn.Linear(8,16), Counts(), nn.Tanh(), Raises(), nn.Linear(16,1))

class Twice(Callback):
    "A second call of the model, as R-Drop makes it, before which all ranks have had the buffers of rank 0 twice"
    def __init__(self, on): self.on = on
    def after_pred(self):
        if not self.training: return
        raises = self.model.module[3]
        raises.on = self.on and self.train_iter==2
        again = self.model(*self.xb)
        raises.on = False
        self.learn.pred = (self.pred+again)/2

def _raises_in_a_second_call(rank):
    learn = steps_of_fp32(rank, 3, lambda: [Twice(True)], model=counting)
    ran_again(learn, [2], 6)
    assert learn.mixed_precision.promoted==['3'] and learn.model[1].n==12 and not learn.model._forward_pre_hooks

def test_what_raises_in_a_second_call_of_the_model(ranks): ranks(_raises_in_a_second_call)

def _raises_in_the_loss(rank):
    learn = steps_of_fp32(rank, 3, lambda: [Poison({2}, 'precision')], model=detour, loss_func=refuses)
    ran_again(learn, [2], 6)
    assert learn.mixed_precision.promoted==['3']

def test_a_loss_function_that_raises(ranks): ranks(_raises_in_the_loss)

class Hidden(nn.Module):
    "An LSTM that goes on with its hidden state, and counts its batches"
    def __init__(self):
        super().__init__()
        self.lstm,self.out,self.raises,self.hidden,self.n = nn.LSTM(8,8),nn.Linear(8,1),Raises(),None,0
    def forward(self, x):
        x,hidden = self.lstm(x[None], self.hidden if self.training else None)
        if self.training: self.hidden,self.n = tuple(h.detach() for h in hidden),self.n+1
        return self.raises(self.out(x[0]))

def _raises_with_a_state(rank):
    class Third(Callback):
        def before_batch(self): self.model.module.raises.on = self.training and self.epoch==1
    learn = learner(Hidden).to_bf16_dynamic()
    together(learn, 3, [Third()])
    agreed(learn)
    ran_again(learn, [2], 6)
    assert learn.model.n==6 and learn.mixed_precision.promoted==['raises']

def test_an_exception_after_a_state_was_carried(ranks): ranks(_raises_with_a_state)

def _raises_anyway(rank, ex, valid):
    "What fp32 raises as well comes through unchanged"
    def boom(p, y):
        if learn.training!=valid: raise ex('a bug')
        return mse(p, y)
    learn = learner(loss_func=boom).to_fp16_dynamic()
    with pytest.raises(ex, match='a bug'):
        with learn.distrib_ctx(sync_bn=False): fit(learn, 2)
    clean(learn)

@pytest.mark.parametrize('ex,valid', [(KeyError,False),(ValueError,False),(ValueError,True)])
def test_what_raises_anyway_ends_all_ranks(ranks, ex, valid): ranks(_raises_anyway, ex, valid)

class NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise ValueError('no derivative')

class Backward(nn.Module):
    def forward(self, x): return NoDerivative.apply(x)

def no_derivative(): return nn.Sequential(nn.Linear(8,16), Backward(), nn.Linear(16,1))

def _raises_backward(rank):
    "After parts of the gradients were sent: no batch can run again"
    learn = learner(no_derivative).to_fp16_dynamic()
    with pytest.raises(ValueError, match='no derivative'), learn.distrib_ctx(sync_bn=False): fit(learn, 2)
    assert not learn.mixed_precision.reports and not len(learn.mixed_precision.history)
    clean(learn)

def test_a_backward_pass_that_raises_ends_the_fit(ranks): ranks(_raises_backward)

def _two_precisions(rank):
    os.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16' # as `accelerate launch --mixed_precision bf16` does
    try:
        with pytest.raises(ValueError, match='--mixed_precision no'): train(rank)
    finally: del os.environ['ACCELERATE_MIXED_PRECISION']

def test_a_second_mixed_precision_is_told_of(ranks): ranks(_two_precisions)

def _asks(rank):
    "All ranks ask for a report in a fit; one runs the model by itself before the step; then all can do what they must do together"
    class Ask(Callback):
        order,n = 50,0
        def ask(self):
            if not self.training or looking(self.learn): return
            self.learn.report = self.learn.diagnose_fp16()
            self.n += 1
        before_batch = after_backward = after_batch = ask
        def after_pred(self):
            if not self.training or looking(self.learn): return
            with pytest.raises(RuntimeError, match='where no backward pass is due'): self.learn.diagnose_fp16()
        def before_step(self):
            if rank: self.model.module(self.xb[0])
    learn,g = train(rank, model=ln_mlp, cbs=[ask := Ask()])
    refs = train(rank, model=ln_mlp)[1]
    assert all(map(torch.equal, sum(g.after, []), sum(refs.after, [])))
    ran_again(learn, [], 4)
    assert learn.report.verdict=='healthy' and ask.n==12
    dist.barrier(dist.new_group([0,1]))

def test_all_ranks_ask_for_a_report_in_a_fit(ranks): ranks(_asks)

def _asks_early(rank):
    "A static graph is recorded by the first backward pass, which must be the step's; in fp32, nobody knows where one is due"
    class Ask(Callback):
        order,refused = 50,0
        def before_batch(self):
            if not self.training or looking(self.learn): return
            try: self.learn.report = self.learn.diagnose_fp16()
            except RuntimeError as e:
                assert (match if self.epoch==self.iter==0 else 'to_fp16_dynamic') in str(e)
                self.refused += 1
    match = 'after the first step, since static_graph=True'
    learn,g = train(rank, 2, model=ln_mlp, cbs=[ask := Ask()], ddp=dict(static_graph=True))
    assert learn.report.verdict=='healthy' and ask.refused==1
    match = 'to_fp16_dynamic'
    together(learner(model=ln_mlp), 2, [ask := Ask()])
    assert ask.refused==4

def test_a_report_before_the_first_step_of_a_static_graph(ranks): ranks(_asks_early)

def _sharded(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel,fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    sharded = fully_shard(ln_mlp(), mesh=init_device_mesh('cpu', (2,))),FullyShardedDataParallel(ln_mlp(), device_id=torch.device('cpu'))
    for model in sharded:
        with pytest.raises(ValueError, match='sharded'): learner(model).to_fp16_dynamic()

def test_sharded_models_are_told_of(ranks): ranks(_sharded)

# From fit to fit

def _differ_before(rank):
    "A fit of each rank by itself: another scale, history, and set of promoted modules"
    learn = learner(detour).to_fp16_dynamic(init_scale=2.**(16-rank))
    fit(learn, 1, cbs=Poison({1}, 'backward' if rank else 'precision'))
    assert learn.mixed_precision.promoted==([] if rank else ['3']) and learn.mixed_precision.n_skipped==rank
    learn.opt = None
    together(learn, 2, [Always(training=True)])
    agreed(learn, reports=False)
    mp = learn.mixed_precision
    assert mp.promoted==['3'] and mp.scaler.get_scale()==2**16 and mp.n_skipped==0 and len(mp.history)==8

def test_a_fit_begins_with_what_rank_0_knows(ranks): ranks(_differ_before)

def _validates_alone(rank):
    learn = learner(mlp).to_fp16_dynamic()
    with learn.distrib_ctx(sync_bn=False), learn.no_bar(), learn.no_logging(): res = learn.validate()
    assert math.isfinite(res[0]) and not learn.mixed_precision.rank_states # nothing that an exception would wait with

def test_a_validation_by_itself(ranks): ranks(_validates_alone)

def resumable(path, rank, cbs=()):
    "Dropout with random numbers of each rank's own"
    def model(): return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16,1))
    bad = [Poison({1,3}, 'backward')] if rank else []
    learn = learner(model, path=path, cbs=[SaveModelCallback(every_epoch=True, with_opt=True), *bad, *cbs])
    torch.manual_seed(rank)
    return learn.to_fp16_dynamic(growth_interval=3)

def _goes_on(rank, path):
    again = resumable(path, rank).load('model_1').remove_cb(Poison)
    with again.distrib_ctx(sync_bn=False): fit(again, 4, start_epoch=2)
    through = resumable(path/'through', rank)
    with through.distrib_ctx(sync_bn=False): fit(through, 4)
    agreed(through)
    assert equal(state(through), state(again))
    assert same(again.mixed_precision.scaler.state_dict())==through.mixed_precision.scaler.state_dict()
    plain = learner(through.model, path=path/'through').load('model_3') # fastai alone
    if rank==0: assert equal(state(plain), state(through))

def _dies(rank, path):
    class Die(Callback):
        def before_backward(self):
            if rank and self.epoch==2: os.kill(os.getpid(), signal.SIGKILL)
    learn,start = resumable(path, rank, [Die()]),time.monotonic()
    try:
        with learn.distrib_ctx(sync_bn=False): fit(learn, 4)
    finally:
        clean(learn)
        assert time.monotonic()-start<timeout

def test_a_killed_rank_ends_the_others_and_the_last_checkpoint_resumes_bit_for_bit(ranks, tmp_path):
    errors = '(?s)rank 0:.*RuntimeError.*rank 1: A process in the process pool was terminated'
    with pytest.raises(AssertionError, match=errors): ranks(_dies, tmp_path)
    ranks(_goes_on, tmp_path)

root = Path(__file__).parent.parent
page = '\n'.join(c.source for c in read_nb(root/'nbs'/'scaling.ipynb').cells)
command = re.search(r'^accelerate launch (.* examples/train_distributed.py --cpu)$', page.replace('\\\n', ''), re.M)[1]
words = [*(str(root/o) if o.startswith('examples') else o for o in command.split()),'--epochs','2','--compress']

def as_its_page_says(out):
    assert re.search(r'^2 processes; .*\n.*$', page, re.M)[0] in out
    assert float(out.split()[-3])>0.9 # the accuracy

def _example(rank, args, path):
    os.chdir(path)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setattr(sys, 'argv', args)
        patch.setattr(dist, 'destroy_process_group', lambda: None) # the group of the other tests
        runpy.run_path(args[0], run_name='__main__')
    return out.getvalue()

def test_the_example_runs_as_its_page_says(ranks, tmp_path):
    script = next(i for i,o in enumerate(words) if o.endswith('.py'))
    as_its_page_says(ranks(_example, words[script:], tmp_path)[0])

@pytest.mark.slow
def test_the_example_runs_by_the_command_of_its_page(tmp_path):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    launch = [sys.executable, '-m', 'accelerate.commands.accelerate_cli', 'launch', '--main_process_port', str(port)]
    res = subprocess.run([*launch, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert res.returncode==0, res.stderr[-2000:]
    as_its_page_says(res.stdout)
