"A comparison with fp32 takes little memory, and is left out where there is not enough; no such error is a fault of half precision"
import pytest,torch
from fastai.basics import (Callback,CancelFitException,CrossEntropyLossFlat,DataLoader,DataLoaders,Learner,SGD,default_device,nn,
                           partial,set_seed)
import fastai_amp16.all # noqa: F401
from fastai_amp16.diagnosis import record
from fastai_amp16.diagnosis.deviation import deviation,loss_change
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from common import Do,between,both,clean,compare_nothing,fit,in_turn,times_and_back,weights
from common import learner as small_learner

def storages(o): return [t.untyped_storage() for t in tree_leaves(o) if isinstance(t, torch.Tensor) and t.layout==torch.strided]

class Allocator(TorchDispatchMode):
    "Counts the bytes of tensors that are made in it and still alive, and raises what a CPU's allocator raises beyond `room`"
    def __init__(self, room=float('inf')):
        super().__init__()
        self.room,self.peak,self.made,self.failed = room,0,{},0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(s).cdata for s in storages((args,kwargs))} # of views, and of what is written to
        for s in storages(res):
            if StorageWeakRef(s).cdata not in given: self.note(s)
        return res
    def note(self, s):
        ref = StorageWeakRef(s)
        self.made[ref.cdata] = ref,s.nbytes()
        if (now := self.alive())>self.room:
            self.failed += 1
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")
        self.peak = max(self.peak, now)
    def alive(self):
        self.made = {k: o for k,o in self.made.items() if not o[0].expired()}
        return sum(n for _,n in self.made.values())

n_words,n_texts,n_tokens = 2000,16,40
large = 4*n_words*n_texts*n_tokens # bytes of predictions in fp32

class Words(nn.Module):
    "A language model: little but its predictions is large; on a level, rounding shows in these, and not in the loss"
    def __init__(self, drop=0., level=0.):
        super().__init__()
        self.emb,self.drop,self.out = nn.Embedding(n_words, 8),nn.Dropout(drop),nn.Linear(8, n_words)
        nn.init.normal_(self.out.weight, std=0.1)
        nn.init.constant_(self.out.bias, level)
    def forward(self, x): return self.out(self.drop(self.emb(x)))

def learner(model=Words, to='to_fp16_dynamic', n=3, **kwargs):
    set_seed(0, reproducible=True)
    x = torch.randint(n_words, (n*n_texts,n_tokens))
    data = list(zip(x, x.roll(-1, 1)))
    dls = DataLoaders(*[DataLoader(data, bs=n_texts) for _ in range(2)], device=default_device())
    learn = Learner(dls, model(), CrossEntropyLossFlat(), SGD, lr=1e-3, **kwargs)
    return getattr(learn, to)(**(dict(init_scale=2.**10) if to=='to_fp16_dynamic' else {}))

def training(learn): fit(learn, 1)
def validation(learn):
    with learn.no_bar(), learn.no_logging(): learn.validate()

def peak(f, learn):
    with Allocator() as a: f(learn)
    return a.peak

class OneStep(Callback):
    "Trains one batch, without a validation"
    def after_batch(self):
        if self.training: raise CancelFitException

@both
@pytest.mark.parametrize('drop', [0.,0.3])
@pytest.mark.parametrize('f', [training,validation])
def test_a_comparison_takes_memory_for_half_a_set_of_predictions(f, drop, to, dtype, monkeypatch):
    "In the first step and in a validation, beside a fit that compares nothing; the loss on predictions included"
    cbs,compared,level = [OneStep()] if f is training else [],[],30. if dtype==torch.float16 else 4.
    model = partial(Words, drop, level)
    def noted(*args, of=loss_change):
        compared.append(res := of(*args))
        return res
    monkeypatch.setattr('fastai_amp16.diagnosis.compare.loss_change', noted)
    with_it = peak(f, learner(model, to, cbs=cbs))
    assert len(compared)==1 and 0<compared[0].bend<0.01
    compare_nothing(monkeypatch)
    without = peak(f, learner(model, to, cbs=cbs))
    assert without>large and with_it-without<=0.5*large and without<=1.3*peak(f, learner(model, 'to_fp32', cbs=cbs))

def wide(): return nn.Sequential(nn.Embedding(n_words, 8), nn.Linear(8, n_words), nn.ReLU(), nn.Linear(n_words, 2))

@both
def test_where_there_is_room_for_the_batch_alone_nothing_is_compared(to, dtype, monkeypatch, recwarn):
    "As in fp32 activations are twice as large; the validation ends as one that compares nothing, and so does the fit after it"
    ends = []
    for room in None,1.1:
        with monkeypatch.context() as m:
            if room is None: compare_nothing(m)
            learn = learner(wide, to)
            learn.loss_func = lambda p, y: p.square().mean()
            with Allocator(room*ends[0][0] if room else float('inf')) as a: validation(learn)
            assert (a.failed>0)==(room is not None)
            training(learn)
        ends.append((a.peak,learn.recorder.values,weights(learn)))
        mp = learn.mixed_precision
        assert not mp.reports and not mp.promoted and mp.n_rerun==mp.n_skipped==0
        clean(learn)
    (_,values,plain),(_,others,compared) = ends
    assert values==others and all(map(torch.equal, plain, compared)) and not [w for w in recwarn if 'amp16' in w.filename]

def too_small(*args, **kwargs): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')

@in_turn(['distances','deviation','loss_change','_same_infinities','states_off','sampled','AllNoted'])
def test_wherever_memory_is_too_small(name, to, dtype, monkeypatch, recwarn):
    "In what differs, the loss on predictions or the notes: the fit ends as without the comparison"
    ends = []
    for compares in False,True:
        with monkeypatch.context() as m:
            if not compares: compare_nothing(m)
            m.setattr(f'fastai_amp16.diagnosis.compare.{name}', too_small)
            learn = learner(Words, to)
            fit(learn, 1)
            validation(learn)
        ends.append(weights(learn))
        mp = learn.mixed_precision
        assert not mp.reports and not mp.promoted and mp.n_rerun==mp.n_skipped==0
    assert all(map(torch.equal, *ends)) and not [w for w in recwarn if 'amp16' in w.filename]

@pytest.mark.parametrize('dtype', [torch.float32,torch.float16], ids=['fp32','fp16'])
def test_a_diagnosis_without_memory_blames_nothing(dtype, monkeypatch):
    "In either of its runs; what is said of an overflow is that memory was too small to look into it"
    def sample(t, of=record.sample):
        if t.dtype==dtype: raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return of(t)
    monkeypatch.setattr(record, 'sample', sample)
    learn = small_learner(between(Do(times_and_back))).to_fp16_dynamic()
    with pytest.warns(UserWarning, match='not enough memory'): fit(learn, 1)
    mp = learn.mixed_precision
    assert not mp.reports and not mp.promoted and mp.n_skipped
    clean(learn)

def test_no_parameter_is_copied_for_a_comparison():
    "A model with large weights and small predictions"
    learn = learner(lambda: nn.Sequential(nn.Embedding(n_words, 500), nn.Flatten(), nn.Linear(500*n_tokens, 3)))
    size = sum(p.nbytes for p in learn.model.parameters())
    learn.loss_func = lambda p, y: p.square().mean()
    with Allocator() as a: validation(learn)
    assert a.peak<1.2*size # autocast's casts of the weights, and what the batch makes of them

def test_where_all_samples_are_the_same_any_difference_is_infinite():
    "In fp32, the mean of equal numbers may be another one"
    b = torch.full((64, 1000), 0.1)+torch.linspace(0, 1, 1000)
    assert deviation(b+1e-3, b)==float('inf') and deviation(b, b)==0

def test_large_predictions_are_judged_as_small_ones():
    "In parts, with any shape"
    torch.manual_seed(0)
    for shape in (3,700_000),(40,300,90),(5,7,90,200),(400_000,),(1,600_000),(600_000,1):
        b = torch.randn(shape)
        a = b+0.1*torch.randn(shape)
        spread = b-b.mean(0) if len(b)>1 else b
        assert deviation(a, b)==pytest.approx(((a-b).norm()/spread.norm()).item(), rel=1e-4)
        assert deviation(a.transpose(0, -1), b.transpose(0, -1))>0
