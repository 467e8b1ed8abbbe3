"The verdict on a batch is right, and what healing keeps in fp32 is needed and enough"
import math,pickle,re
import pytest,torch
from fastai.basics import nn,partial,set_seed
from torch.utils.checkpoint import checkpoint
from fastai_amp16.diagnosis.case import Case,faults
from fastai_amp16.diagnosis.deviation import deviation
from fastai_amp16.diagnosis.diagnose import diagnose
from fastai_amp16.diagnosis.measure import sampled
from fastai_amp16.diagnosis.healing import Verdict,_merged,after,diagnose_step
from fastai_amp16.precision.entry import Entry
from fastai_amp16.precision.plan import PrecisionPlan
from fastai_amp16.diagnosis.remedy import ddmin,least_in_fp32
from fastai_amp16.diagnosis.report import PrecisionReport
from fastai_amp16.train.rerun import Batches,Abandoned
from fastai_amp16.train.step import Next,Step
from fastai_amp16.train.snapshot import LearnerState,ModelState
from common import Called,Do,between,equal,learner,masked_fill,mlp,mse,small_root,state,times_and_back

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')


def case(model, x=None, y=None, loss_func=None, scale=2.**16, min_scale=2.**-24, keep_fp32=None, dtype=torch.float16, n=1, **kwargs):
    "A batch without a fit or a callback: the inputs `x`, a tensor or several, in `n` parts whose gradients are accumulated"
    learn,entry = learner(model, loss_func=loss_func, **kwargs),Entry()
    learn.create_opt()
    learn.training = learn.model.train().training
    entry.patch(learn.model)
    step = Step(Batches(learn, entry, ModelState(learn.model, learn.loss_func), LearnerState(learn)))
    xs = torch.randn(8,8) if x is None else x
    xs,y = xs if isinstance(xs, tuple) else (xs,),torch.randn(8,1) if y is None else y
    for part in zip(*(t.chunk(n) for t in (*xs, y))):
        learn.xb,learn.yb = part[:-1],part[-1:]
        step.batches.add()
    def one_batch():
        learn.pred = learn.model(*learn.xb)
        learn.loss_grad = learn.loss_func(learn.pred, *learn.yb)
        learn.loss = learn.loss_grad.detach().clone()
        if step.stop_at_loss(learn.loss): raise Abandoned
        step.batches.gradients.scaled(learn.loss_grad, step.loss_scale).backward()
    step.batches.do_one_batch = one_batch
    return Case(step, keep_fp32, dtype, scale, min_scale)

def with_nan(t, *at):
    t = t.clone()
    for i in at: t[i] = math.nan
    return t

# %% verdicts
def poisoned():
    model = between(nn.ReLU())()
    with torch.no_grad(): model[2].weight[0,3] = math.inf
    return model

class Aux(nn.Module):
    "The loss function uses an activation, in half precision"
    def __init__(self):
        super().__init__()
        self.lin,self.out = nn.Linear(8,16),nn.Linear(16,1)
    def forward(self, x):
        self.aux = self.lin(x)*400
        return self.out(self.aux/400)
class AuxLoss:
    def __init__(self, model): self.model = model
    def __call__(self, p, t): return mse(p, t)+1e-9*self.model.aux.pow(2).mean()

def aux_case():
    model = Aux()
    return case(model, loss_func=AuxLoss(model))

def rms(x):
    x = 1e3*x
    return x*torch.rsqrt((x*x).mean(-1, keepdim=True))

def norm_of_zero(x): return x*torch.sqrt((x*0).pow(2).sum())

class Never(nn.Module):
    "A loss function that divides by 0"
    def forward(self, p, t): return (p-t).sum()/(0*t).sum()

def underflow(x): return x/(x.detach()*0+1e-9)*1e-9
def lost_in_1(x): return (x*1e-4+1-1)*1e4

def mid(*fs, **kwargs): return lambda: case(between(*map(Do, fs)), **kwargs)
def healthy(**kwargs): return case(between(nn.ReLU()), **kwargs)

verdicts = dict(
    weights=(lambda: case(poisoned), 'weights', '2', None, r'`2\.weight` \(1 of 16 numbers\)'),
    inputs=(lambda: healthy(x=with_nan(torch.randn(8,8), 2, 5)), 'data', None, None, r'inputs .* in 2 of its 8 samples \(indices 2, 5\)\.'),
    targets=(lambda: healthy(y=with_nan(torch.randn(8,1), 7)), 'data', None, None, r'targets .* in 1 of its 8 samples \(index 7\)\.'),
    divergence=(mid(lambda x: x*1e30, lambda x: x*1e30, lr=0.5), 'divergence', '2', None,
                r'not finite in fp32 either, first in `2` \(Do\)\.$'),
    log=(mid(lambda x: x.log()), 'divergence', '1', 'log', r'first in `log` in `1` \(Do\), although no number that goes in exceeds \d\.'),
    log_loss=(lambda: healthy(loss_func=lambda p,t: (p-p).abs().log().mean()), 'divergence', None, 'log',
              r'first in `log` in the loss function'),
    exp=(mid(lambda x: (x*1e3).exp()), 'divergence', '1', 'exp', r'first in `exp` in `1` \(Do\), although no number that goes in exceeds'),
    singular=(mid(norm_of_zero), 'divergence', '1', None, r'backward pass is not finite in fp32 either, first in `1` \(Do\)'),
    scale=(lambda: healthy(loss_func=lambda p,t: 1e4*mse(p, t)), 'scale', None, None, r'65536 is too high .* fits'),
    noise=(lambda: case(mlp(), x=1e3*torch.randn(8,8), loss_func=lambda p,t: 64*mse(p, t)), 'scale', None, None,
           r'65536 is too high .* fits'), # the gradient of a bias before a norm is noise
    forward=(mid(lambda x: x*1e6, lambda x: x*1e-6), 'forward', '1', 'mul', r'`mul` in `1` \(Do\) gives numbers up to .*65504'),
    intermediate=(mid(lambda x: x*1e6/1e6), 'forward', '1', 'mul', r'`mul` in `1` \(Do\)'),
    underflow=(mid(underflow), 'forward', '1', 'div', r'`(true)?div` in `1` \(Do\)'),
    raises=(mid(masked_fill), 'forward', '1', 'masked_fill', r'`masked_fill` in `1` \(Do\) raises in float16'),
    backward=(mid(small_root), 'backward', '1', 'sqrt', r'derivative of `sqrt` in `1` \(Do\)'),
    nested=(lambda: case(between(nn.Sequential(Do(small_root)))), 'backward', '1.0', 'sqrt', r'derivative of `sqrt` in `1\.0` \(Do\)'),
    silent=(mid(rms, scale=1.), 'forward', '1', 'mul', 'Predictions differ from fp32.s by'),
    rounded=(mid(lost_in_1, dtype=torch.bfloat16, scale=1., min_scale=None), 'forward', '1', 'add',
             r'in `1` \(Do\) computes with numbers up to 1, which bfloat16 holds in steps of 0.00781'),
    loss=(aux_case, 'loss', None, 'pow', r'`pow` in the loss function'),
    healthy=(healthy, 'healthy', None, None, r'Everything is finite in float16 at the loss scale 65536\. The least room is in'),
)

def test_a_run_that_ends_early_keeps_no_graph():
    "It would hold all activations until the diagnosis ends"
    run = mid(lambda x: x*1e6)().run(modules=False)
    assert not run.finite and run.pred.grad_fn is None

@pytest.mark.parametrize('name', verdicts)
def test_verdict(name):
    make,verdict,producer,op,sentence = verdicts[name]
    set_seed(0)
    c = make()
    before = state(c.learn)
    r = diagnose(c)
    assert (r.verdict,r.producer)==(verdict,producer) and re.search(sentence, r.sentence), r
    assert op is None or r.op in (op,'true'+op)
    assert r.samples==dict(inputs=[2,5], targets=[7]).get(name, []) and equal(before, state(c.learn))
    text,page = str(r),r._repr_html_()
    assert text.startswith(f'{verdict}: ') and r.sentence in text and (verdict=='healthy' or r.remedy in text)
    assert ('\n> ' in text)==('▶' in page)==(producer is not None) and str(pickle.loads(pickle.dumps(r)))==text
    if verdict=='scale':
        assert c.run(scale=r.new_scale).finite and r.new_scale>=c.min_scale and not c.run(scale=r.new_scale*64).finite
    if verdict in ('forward','backward','loss'):
        promoted,scale,*_ = least_in_fp32(c)
        assert c.is_sound(promoted, scale) and not c.is_sound([], scale) and promoted==['.' if name=='loss' else producer]

@pytest.mark.parametrize('name', ['forward','backward'])
def test_a_diagnosis_that_heals_brings_what_helps(name):
    c = verdicts[name][0]()
    r = diagnose(c)
    assert r.promoted==['1'] and r.producer=='1' and c.run(r.promoted, r.new_scale).finite

def test_lower_scales_are_spoken_of_only_where_they_were_tried():
    def said(**kwargs): return diagnose(case(between(Do(small_root)), **kwargs)).sentence
    assert 'in float16, not even at the loss scale' in said() and 'in float16, at the loss scale 64;' in said(scale=64., min_scale=None)

def test_without_a_backward_pass_the_forward_pass_is_judged_alone():
    "As in a validation"
    def judged(f):
        c = case(between(Do(f)))
        c.backward = False
        r = diagnose(c)
        return r.verdict,r.promoted,bool(r.table.gradient.isna().all())
    assert judged(times_and_back)==('forward',['1'],True)
    def and_root(x): return x+small_root(x)*1e-5
    assert judged(and_root)==('healthy',[],True) and diagnose(case(between(Do(and_root)))).verdict=='backward'

def test_a_silent_fault_is_healed_without_looking_inside_first():
    c = case(between(Do(small_root)))
    c.backward = False
    r = diagnose(c)
    assert (r.verdict,r.producer,r.promoted)==('forward','1',['1']) and deviation(c.run(r.promoted, r.new_scale).pred, c.fp32.pred)<1e-2

def test_accumulated_batches_are_judged_together():
    "Any of them may be at fault, and their gradients add up"
    def parts(x, **kwargs): return diagnose(case(between(nn.ReLU()), torch.cat([x, torch.randn(6,8)]), n=4, **kwargs))
    assert parts(torch.randn(2,8)).verdict=='healthy'
    r = parts(with_nan(torch.randn(2,8), 1))
    assert (r.verdict,r.samples)==('data',[1]) and 'of its 2 samples' in r.sentence
    c = case(between(Do(lambda x: x*200/200)), torch.cat([torch.full((2,8), 1e3), torch.randn(6,8)]), n=4)
    assert diagnose(c).verdict=='forward' and least_in_fp32(c)[0]==['1']

def test_a_meant_infinity_is_no_fault():
    "A mask of -inf, and what an attention makes of it"
    class Attn(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp,self.mha,self.out = nn.Linear(8,16),nn.MultiheadAttention(16, 2, batch_first=True),nn.Linear(16,1)
        def forward(self, x):
            h = self.inp(x)[:,None].expand(-1,4,-1)
            mask = torch.full((4,4), -math.inf).triu(1)
            scores = (h@h.transpose(1,2)).masked_fill(mask.isinf(), -math.inf)
            return self.out(self.mha(scores.softmax(-1)@h, h, h, attn_mask=mask)[0].mean(1))
    r = diagnose(case(Attn))
    assert r.verdict=='healthy' and not r.table.nonfinite.any()

# %% who is named
class Large(nn.Module):
    "In its own code; it holds all weights"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8,1)
        nn.init.constant_(self.lin.bias, 12.)
    def forward(self, x): return self.lin(x)*1e5*1e-6

def test_not_a_producer_but_its_victims_parent():
    "What overflows in a module's own code is not laid to the child that gets it"
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin1,self.lin2 = nn.Linear(16,16),nn.Linear(16,16)
        def forward(self, x): return self.lin2((self.lin1(x)*1e6).relu())*1e-6
    r = diagnose(case(between(nn.Sequential(Block()))))
    assert (r.verdict,r.producer,r.op)==('forward','1.0','mul')
    r = diagnose(case(Large))
    assert (r.verdict,r.producer,r.op)==('forward','','mul')

@pytest.mark.parametrize('last', [True, False], ids=['module','model'])
def test_a_prediction_that_is_cast_is_nobodys_code(last):
    "It leaves the last module in half precision, and the model in fp32; its gradient is large in fp32, too"
    class Sure(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin,self.act = nn.Linear(8,1),nn.Sigmoid() if last else nn.Identity()
            nn.init.constant_(self.lin.bias, 12.)
        def forward(self, x): return self.act(self.lin(x)) if last else self.act(self.lin(x)).sigmoid()
    r = diagnose(case(Sure, y=torch.tensor([[0.],[1.]]*4), loss_func=nn.BCELoss()))
    assert (r.verdict,r.producer,r.op,r.promoted)==(('backward','act',None,['act']) if last else ('backward','','sigmoid',['.']))

def test_a_module_that_only_looks_on_has_no_derivative():
    "It takes in the tensor whose gradient is bad, deeper inside than the module at fault"
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin,self.out,self.root,self.log = nn.Linear(8,16),nn.Linear(16,1),Do(small_root),nn.Sequential(nn.Sequential(nn.Tanh()))
        def forward(self, x):
            h = self.lin(x)
            self.log(h)
            return self.out(self.root(h))
    assert diagnose(case(Model)).producer=='root'

def test_a_module_named_like_the_loss_function():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin,self.loss_func = nn.Linear(8,1),Do(times_and_back)
        def forward(self, x): return self.loss_func(self.lin(x))
    r = diagnose(c:=case(Model))
    assert (r.verdict,r.producer)==('forward','loss_func') and least_in_fp32(c)[0]==['loss_func']

def test_a_module_made_in_forward_belongs_to_the_code_that_makes_it():
    "It is no part of the model, and none of the loss function either"
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.acts = [Do(lambda x: x*x)] # a plain list
        def forward(self, x): return nn.Identity()(self.acts[0](x))/1e5
    r = diagnose(case(between(Do(lambda x: x*1e3), Hidden())))
    assert (r.verdict,r.producer,r.op)==('forward','2','mul')

def test_a_harmless_mask_is_not_named():
    "It becomes -inf in half precision, and a softmax makes 0 of it; what overflows is another"
    class Soft(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask,self.inp = Do(lambda s: (torch.ones(4,4).triu(1)*-1e9).to(s.dtype)),nn.Linear(8,4)
            self.ffn,self.out = nn.Sequential(nn.Linear(4,4), Do(times_and_back)),nn.Linear(4,1)
        def forward(self, x):
            h = self.inp(x)
            s = (h[:,:,None]*h[:,None]+self.mask(h)).softmax(-1)
            return self.out(self.ffn((s@h[...,None])[...,0]))
    r = diagnose(case(Soft))
    assert (r.producer,r.op,r.promoted)==('ffn.1','mul',['ffn.1']) and '`mul` in `ffn.1` (Do)' in r.sentence

def test_a_loss_function_that_calls_itself():
    def make():
        def loss(p, t, n=2): return mse(p, t) if n==0 else later if n<0 else loss(p, t, n-1)
        c = case(between(nn.ReLU()), loss_func=loss)
        assert diagnose(c).verdict=='healthy' # `later` is not there yet
        later = 1
        return later
    assert make()

# %% infinities that are meant
class Masked(nn.Module):
    "Two inputs, one of them a mask of 0 and -inf; a frozen mask and a buffer of -inf"
    def __init__(self):
        super().__init__()
        self.lin,self.out,self.prior = nn.Linear(8,4),nn.Linear(4,1),nn.Parameter(torch.tensor([0.,0.,0.,-math.inf]), requires_grad=False)
        self.register_buffer('never', torch.tensor([0.,-math.inf,0.,0.]))
    def forward(self, x, mask): return self.out((self.lin(x)+mask+self.prior+self.never).softmax(-1))

def mask_inputs():
    mask = torch.zeros(8,4)
    mask[::2,0] = -math.inf
    return torch.randn(8,8),mask

def test_meant_infinities_in_inputs_weights_and_buffers_are_not_blamed():
    x,mask = mask_inputs()
    def verdict(x, mask=mask, broken=None):
        model = Masked()
        if broken: model.get_buffer(broken).fill_(math.nan) if broken=='never' else nn.init.constant_(model.lin.bias, math.nan)
        return diagnose(case(model, (x,mask)))
    assert verdict(x).verdict=='healthy'
    r = verdict(with_nan(x, 1, 4))
    assert (r.verdict,r.samples)==('data',[1,4]) and 'inputs of the batch' in r.sentence
    r = verdict(with_nan(x, 1), with_nan(mask, 1, 6))
    assert (r.verdict,r.samples)==('data',[1,6])
    assert verdict(x, broken='never').sentence.startswith('Weights or buffers are not finite to begin with: `never` (4 of 4 numbers)')
    assert verdict(with_nan(x, 1), broken='weight').verdict=='weights'

def test_divergence_beside_a_mask_of_infinities():
    c = case(Masked, mask_inputs())
    with torch.no_grad(): c.model.lin.weight.fill_(3e38)
    assert diagnose(c).verdict=='divergence'

def test_divergence_after_a_mask_is_not_laid_to_the_mask():
    "As in a transformer, whose attention adds -inf to what it masks"
    def masked(x): return x+(x*0+torch.where(torch.arange(16)<8, 0., -math.inf)).softmax(-1)
    r = diagnose(case(between(Do(masked), Do(lambda x: x*1e30), Do(lambda x: x*1e9)), lr=0.5)) # some become infinite
    assert (r.verdict,r.producer)==('divergence','3')

def test_gradients_that_are_infinite_times_the_loss_scale():
    "They are finite, but no room is left to measure"
    r = diagnose(case(between(Do(lambda x: x*1e30), Do(lambda x: x*2e8))))
    assert r.verdict=='divergence' and r.table.gradient.max()==math.inf

def test_a_run_shows_the_derivative_that_fails_first_and_none_that_got_what_it_gave():
    c = case(between(Do(small_root), nn.Linear(16,16), Do(small_root)))
    c.fp32 = c.run_fp32()
    for kept,name in (([],'3'), (['3'],'1'), (['1'],'3')):
        assert [(phase,f.name,f.op) for phase,f in faults(c.run(kept, 1., reference=c.fp32))]==[('backward',name,'sqrt')]

# %% healing
def test_an_unneeded_promotion_is_given_back():
    "Two modules overflow, one after the other; the second is healed by the first"
    c = case(between(Do(lambda x: x*1e6), Do(lambda x: x*(1e-3 if x.dtype==torch.float32 else 1e-2)), Do(lambda x: x*1e-3)))
    r = diagnose(c)
    assert c.run(r.promoted, r.new_scale).finite
    assert r.promoted and not any(c.run([p for p in r.promoted if p!=q], r.new_scale).finite for q in r.promoted)

def test_a_layer_and_a_scale_at_once():
    "The layer is kept in fp32, and the scale that fits comes with it"
    c = case(between(Do(times_and_back)), loss_func=lambda p,t: 1e4*mse(p, t))
    assert diagnose(c).verdict=='forward'
    promoted,scale,*_ = least_in_fp32(c)
    assert promoted==['1'] and scale<2**16 and c.run(promoted, scale).finite and not c.run(promoted, 2.**16).finite

@pytest.mark.parametrize('loss_func', [lambda p,t: mse(p, t)*math.nan, lambda p,t: (p-(t-9).log()).square().mean(), Never()])
def test_a_loss_function_that_is_nan_for_any_predictions_is_named(loss_func):
    r = diagnose(case(between(nn.ReLU()), loss_func=loss_func))
    assert re.search('first in `.*` in the loss function', r.sentence) and (r.verdict,r.producer,r.promoted)==('divergence',None,[])

def test_a_module_that_takes_half_precision_by_itself_is_not_healed():
    "fp32 does not help it, so it is not precision"
    r = diagnose(case(between(Do(lambda x: ((x*1e5).half()*1e-5).float()))))
    assert (r.verdict,r.promoted)==('divergence',[])

def test_what_is_kept_already_is_part_of_the_case():
    c = case(between(Do(times_and_back)), keep_fp32='1')
    r = diagnose(c)
    assert r.verdict=='healthy' and r.table.set_index('module').computes.to_dict()=={'0':'float16', '1':'fp32', '2':'float16'}

class Squares(nn.Module):
    "A square in its own code, which is kept in fp32 with the layers inside in half precision"
    def __init__(self):
        super().__init__()
        self.body,self.norm,self.head = nn.Linear(4,16),nn.LayerNorm(16),nn.Linear(16,2)
    def forward(self, x):
        h = self.body(x)
        return self.head(self.norm(h*h))

def test_the_scale_that_fits_where_own_code_is_kept():
    "The gradients of the loss are large"
    def squares(scale):
        x,y = 1000*torch.randn(32,4),torch.randint(2, (32,))
        return case(Squares, x, y, lambda p,t: 300*nn.functional.cross_entropy(p, t), scale, keep_fp32=['.'])
    def at(scale):
        set_seed(0)
        return squares(scale)
    fits = max(s for s in range(17) if at(2.**s).run().finite)
    report = diagnose(at(2.**16))
    assert report.verdict=='scale' and 2.**(fits-2)<=report.new_scale<=2.**fits and fits>4

class Wide(nn.Module):
    "A layer whose numbers overflow"
    def __init__(self, ni=8, nf=64):
        super().__init__()
        self.lin = nn.Linear(ni, nf)
        with torch.no_grad(): self.lin.weight.mul_(1e6)
    def forward(self, x): return self.lin(x)*1e-6

@pytest.mark.parametrize('make,kept', [(lambda: Wide().lin, '0'), (lambda: nn.Sequential(Wide()), '0.0.lin'), (Wide, '0.lin'),
                                       (Large, '0.')],
                         ids=['layer','nested','inside','own code'])
def test_a_layer_with_nearly_all_weights_has_its_plain_name(make, kept):
    "Only what has modules inside has code of its own to speak of"
    c = case(lambda: nn.Sequential(make(), Do(lambda x: x.tanh().mean(1, keepdim=True))))
    assert diagnose(c).remedy==f"learn.to_fp16_dynamic(keep_fp32=['{kept}'])" and least_in_fp32(c)[0]==[kept]

class Feed(nn.Module):
    "A block whose numbers are large between its two layers, `k` times"
    def __init__(self, k=1.):
        super().__init__()
        self.f1,self.f2 = nn.Linear(16,32),nn.Linear(32,16)
        with torch.no_grad():
            self.f1.weight.mul_(k)
            self.f2.weight.div_(k)
    def forward(self, x): return x+self.f2(self.f1(x).relu())

def test_of_many_blocks_only_the_layers_at_fault_are_kept():
    "And not the blocks around them, whose residual sums have no part in it"
    r = diagnose(case(lambda: nn.Sequential(nn.Linear(8,16), *(Feed(1e5 if i in (1,4) else 1.) for i in range(6)), nn.Linear(16,1))))
    assert r.producer=='2.f1' and r.promoted==['2.f1','2.f2','5.f1','5.f2'] and '`2.f1` (Linear) gives numbers up to' in r.sentence

class Scores(nn.Module):
    "A transformer's block with attention scores that are `k` times as large before they are divided by it"
    def __init__(self, k=3e5):
        super().__init__()
        self.q,self.k,self.v,self.o,self.f1,self.f2 = [nn.Linear(16,16) for _ in range(6)]
        self.norm1,self.norm2,self.by = nn.LayerNorm(16),nn.LayerNorm(16),k
    def forward(self, x, *, mask=None):
        h = self.norm1(x)
        s = (self.q(h)*self.by**0.5)@(self.k(h)*self.by**0.5).transpose(1,2)/self.by
        if mask is not None: s = s.masked_fill(mask, -math.inf)
        x = x+self.o(s.softmax(-1)@self.v(h))
        return x+self.f2(self.f1(self.norm2(x)).relu())

class Blocks(nn.Module):
    def __init__(self, *ks):
        super().__init__()
        self.inp,self.blocks,self.out = nn.Linear(8,16),nn.ModuleDict({f'b{i}': Scores(k) for i,k in enumerate(ks)}),nn.Linear(16,1)
    def forward(self, x):
        x,mask = self.inp(x).unflatten(0, (-1,4)),torch.ones(4,4,dtype=torch.bool).triu(1)
        for b in self.blocks.values(): x = b(x, mask=mask)
        return self.out(x).flatten(0, 1)

@pytest.mark.parametrize('bad', [range(8), (1,4,6)], ids=['all','three'])
def test_own_code_alone_is_kept_and_its_layers_stay(bad):
    "Of a transformer's 50 layers, 48 or more compute in half precision after scores beyond 65504 were healed"
    c = case(lambda: Blocks(*(3e5 if i in bad else 1. for i in range(8))))
    r = diagnose(c)
    assert r.promoted==[f'blocks.b{i}.' for i in bad] and r.producer==f'blocks.b{bad[0]}' and r.op in ('matmul','mul')
    layers = [m for m in c.model.modules() if isinstance(m, nn.Linear)]
    in_fp32 = PrecisionPlan(c.model, c.dtype, r.promoted).in_fp32
    assert len(layers)==50 and sum(m in in_fp32 for m in layers)<=2

def test_what_overflows_before_something_else_raises_is_not_said_to_raise():
    r = diagnose(case(between(Do(times_and_back), nn.Linear(16,16), Do(masked_fill))))
    assert r.promoted==['1','3'] and r.producer=='1' and '`mul` in `1` (Do) gives numbers' in r.sentence and 'raises' not in r.sentence

@pytest.mark.parametrize('f', [times_and_back, small_root], ids=['forward','backward'])
@pytest.mark.parametrize('reentrant', [True,False])
def test_a_checkpoint_changes_no_verdict(f, reentrant):
    "A reentrant one runs everything twice, the second time from the end"
    def told(around):
        r = diagnose(case(lambda: Called(f, around)))
        return r.warning,r.producer,r.op,r.promoted,r.new_scale
    plain = told(lambda b, x: b(x))
    assert told(partial(checkpoint, use_reentrant=reentrant))==plain and plain[3]==['blocks.1.1','blocks.3.1']

@pytest.mark.parametrize('norm', [nn.LayerNorm,nn.BatchNorm1d,partial(nn.GroupNorm, 4),nn.RMSNorm], ids=['layer','batch','group','rms'])
def test_a_norm_whose_output_passes_65504_is_said_to_do_that(norm):
    "No cast behind it is named, and what stays in fp32 begins with it"
    def model():
        model = between(norm(16), nn.ReLU(inplace=True))()
        with torch.no_grad():
            model[1].weight.fill_(2e5)
            model[3].weight.mul_(1e-5)
        return model
    r = diagnose(case(model))
    assert re.match(r'`1` \(\w+\) gives numbers up to [\d.e+]+, but the largest float16 number is 65504', r.sentence) and r.op is None
    assert r.producer==r.promoted[0]=='1' and r.promoted in (['1'],['1','3']) and r.remedy==f'learn.to_fp16_dynamic(keep_fp32={r.promoted})'

class Intermediate(nn.Module):
    "Gradients are 2**8 times as large on the way"
    def __init__(self):
        super().__init__()
        self.inp,self.out = nn.Linear(8,16),nn.Linear(16,1)
    def forward(self, x): return self.out((self.inp(x)*2**-8)*2**8)

class Temperature(Intermediate):
    "A logit scale, learned"
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(5.))
    def forward(self, x): return self.out(nn.functional.normalize(self.inp(x), dim=-1)*self.scale.exp())

class Linear(Intermediate):
    "Attention without a softmax, whose sums pass 65504: own code is kept, and the scale that fits is another"
    def forward(self, x):
        h = self.inp(100*x).unflatten(0, (-1,4))
        q,k,v = nn.functional.elu(h)+1,nn.functional.elu(-h)+1,h
        return self.out((q@(k.transpose(1,2)@v)/(q@k.sum(1)[...,None])/100).flatten(0, 1))

@pytest.mark.parametrize('model', [Intermediate,Temperature,Linear])
@pytest.mark.parametrize('k', [1e2,1e4])
def test_the_scale_that_fits_own_code(model, k):
    "It is within a factor of four of the highest power of two that does"
    c = case(model, loss_func=lambda p,t: k*mse(p, t))
    r = diagnose(c)
    assert r.verdict==('forward' if model is Linear else 'scale') and r.promoted==['.']*(model is Linear)
    best = max(e for e in range(-24, 17) if c.is_sound(r.promoted, 2.**e))
    assert best<16 and best-2<=math.log2(r.new_scale)<=best

def test_the_remedy_without_healing_leaves_something_in_half():
    assert diagnose(case(Large)).remedy=="learn.to_fp16_dynamic(keep_fp32=['.'])"

# %% pieces
@pytest.mark.parametrize('needed', ['', 'a', 'h', 'bf', 'cdg', 'abcdefgh'])
@pytest.mark.parametrize('kinds', ['a b c d e f g h', 'a', 'a b c'])
def test_ddmin_finds_the_least_that_is_sound(kinds, needed):
    "No name is left that is not needed, where each is of another kind"
    kinds = [*map(list, kinds.split())]
    needed = {o for o in needed if [o] in kinds}
    kept = ddmin(kinds, lambda names: needed<=set(names))
    assert kept==sorted(needed)

@pytest.mark.parametrize('kinds,needed,least', [
    ('abcd efgh', 'abcd', 'abcd'), ('abcd efgh', 'a', 'a'), ('abcd efgh', 'gh', 'gh'), ('abcdefgh', 'ab', 'ab'), ('abcdefgh', 'fg', 'efgh'),
    ('abcdefgh', 'ah', 'abcdefgh')])
def test_ddmin_takes_all_of_a_kind_if_no_half_can_be_left_out(kinds, needed, least):
    "Alike blocks fail alike, and a hundred of them need not be looked at one by one"
    asked = []
    def is_sound(names):
        asked.append(names)
        return {*needed}<={*names}
    assert ddmin([*map(list, kinds.split())], is_sound)==list(least) and len(asked)<=8

def test_ddmin_keeps_what_may_not_be_asked():
    answers = iter([True])
    assert ddmin([['a'],['b'],['c']], lambda names: next(answers, False))==['a','b']

def test_deviation():
    "0 where all is the same, about 1 for what has nothing to do with it, whatever the size; an offset that all samples share hides nothing"
    set_seed(0)
    a,b = torch.randn(500,3),torch.randn(500,3)
    assert deviation(a, a)==0 and deviation(a, 1.01*a)==pytest.approx(0.01, rel=0.1)
    assert deviation(1e6*a, 1e6*b)==pytest.approx(2**0.5, rel=0.1)
    assert deviation(a+1, b+1)>1 and deviation(0*a, a)==pytest.approx(1, rel=0.01)
    assert deviation(100+1e-3*a, 100+1e-3*b)==pytest.approx(2**0.5, rel=0.1) # what differs from sample to sample is what counts
    assert deviation([a,{'p': b}], [a,{'p': a}])==deviation(b, a)
    holes = torch.where(a>2, math.inf, a) # meant, or looked at by others
    assert deviation(holes, a)==0 and deviation(a.half(), a)<1e-3 and deviation(torch.tensor(2.), torch.tensor(1.))==1

def test_a_failure_is_a_part_of_what_was_found():
    def boom(x): raise ValueError('now')
    fp32 = diagnose_step(case(between(Do(boom))))
    assert (fp32.verdict,fp32.reports,fp32.error)==(Verdict.no_fp32,[],None)
    assert fp32.failures==['in fp32 the batch raises ValueError (now)']
    good = diagnose_step(case(between(Do(masked_fill))), error := RuntimeError('in half precision'))
    assert (good.verdict,good.kept,good.failures)==(Verdict.healed,['1'],[]) and good.error is error and len(good.reports)==1

def test_an_exception_that_fp32_raises_as_well_is_the_same():
    error = ValueError('now')
    def boom(x): raise error
    d = diagnose_step(case(between(Do(boom))), error)
    assert d.verdict is Verdict.raises and d.error is error and not d.failures

def test_an_exception_that_does_not_come_again_is_not_laid_to_half_precision():
    "One that comes by chance, or with the number of the call"
    d = diagnose_step(case(between(Do(times_and_back))), error := RuntimeError('once'))
    assert (d.verdict,d.reports)==(Verdict.gone,[]) and d.error is error

@pytest.mark.parametrize('make,verdict', [(mid(times_and_back), Verdict.healed), (verdicts['scale'][0], Verdict.scale),
                                          (verdicts['inputs'][0], Verdict.lost), (healthy, Verdict.gone)])
def test_the_verdict_on_a_step(make, verdict):
    d = diagnose_step(make())
    assert d.verdict is verdict and len(d.reports)==(verdict is not Verdict.gone) and not d.failures
    assert d.kept==(['1'] if verdict is Verdict.healed else [])
    assert d.scale is None or d.scale<2**16 or verdict is Verdict.healed
    assert (d.scale is not None)==(verdict in (Verdict.healed,Verdict.scale))

# verdict: what follows with 'heal', with 'heal' if an exception was raised, with 'warn', and with 'warn' after an exception; a star: it is
# known that no precision can use the batch
table = dict(healed='again again again* raise', scale='again again again again', unhealed='fp32 fp32 again* raise',
             lost='reference* raise reference* raise', **dict.fromkeys(('fine','gone'), 'again raise again raise'),
             unknown='fp32 fp32 again* raise', no_fp32='again* raise again* raise', raises='raise raise raise raise')

@pytest.mark.parametrize('name', table)
def test_what_follows_a_diagnosis(name):
    def row(verdict, *ways):
        for on_spiral,raised in ways:
            what,lost = after(verdict, on_spiral, raised=raised)
            yield (what.name if what else 'raise')+'*'*lost
    verdict = Verdict[name]
    assert table[name].split()==list(row(verdict, *((o,r) for o in ('heal','warn') for r in (False,True))))
    assert [after(verdict, 'raise', raised=r) for r in (False,True)]==[after(verdict, 'warn', raised=r) for r in (False,True)]

def test_what_follows_a_diagnosis_otherwise():
    "A second one of the step, predictions that are wrong but finite, and a validation"
    assert len(table)==len(Verdict)
    assert after(Verdict.fine, again=True)==(Next.fp32,False) and after(Verdict.fine, 'warn', again=True)==(Next.again,True)
    assert after(Verdict.fine, training=False)==(Next.again,True)
    for verdict in (Verdict.unhealed,Verdict.fine,Verdict.gone,Verdict.unknown): assert after(verdict, silent=True)==(Next.again,False)
    assert after(Verdict.lost, silent=True)==(Next.reference,True)

class Within(nn.Sequential):
    "A container with code of its own"
    def forward(self, x): return times_and_back(super().forward(x))

class Dense(nn.ModuleDict):
    "As torchvision's dense blocks are written"
    def forward(self, x):
        for m in self.values(): x = x+m(x)
        return times_and_back(x)

class Alone(nn.Module):
    "A model without modules"
    def __init__(self):
        super().__init__()
        self.w,self.h = nn.Parameter(torch.randn(16,8)/3),nn.Parameter(torch.randn(1,16)/4)
    def forward(self, x): return nn.functional.linear(times_and_back(nn.functional.linear(x, self.w)), self.h)

@pytest.mark.parametrize('block,promoted', [
    (lambda: Within(nn.Linear(16,16), nn.ReLU()), ['1.0.','1.1.','1.2.']),
    (lambda: Dense({k: nn.Linear(16,16) for k in 'ab'}), ['1.0.'])]) # whose sums are fp32 from then on
def test_containers_with_code_of_their_own(block, promoted):
    "Their code alone is to blame, and has a row of the table; plain containers have neither"
    r = diagnose(case(between(nn.Sequential(*[block() for _ in range(3)]))))
    assert (r.verdict,r.producer,r.op,r.promoted)==('forward','1.0','mul',promoted)
    assert '1.0' in set(r.table.module) and '1' not in set(r.table.module)

def test_a_model_without_modules():
    r = diagnose(case(Alone))
    assert (r.verdict,r.producer,r.op,r.promoted)==('forward','','mul',['.'])
    assert r.sentence.startswith('`mul` in the code of the model itself (Alone) gives numbers up to ')

def test_a_module_whose_name_begins_like_an_article():
    def model():
        res = nn.Sequential()
        for name,*size in (('one',8,16),('theta',16,16),('two',16,1)): res.add_module(name, nn.Linear(*size))
        with torch.no_grad(): res.theta.weight.mul_(1e6)
        return res
    assert diagnose(case(model)).sentence.startswith('`theta` (Linear) gives numbers up to ')

def test_predictions_whose_number_depends_on_them_tell_nothing():
    assert deviation([torch.ones(3)], [torch.ones(4)])==0
    assert deviation([torch.ones(3),2*torch.ones(4)], [torch.ones(4),torch.ones(4)])>0.5

def test_sparse_inputs_are_left_alone():
    x = torch.randn(8,8).to_sparse()
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8,1))
        def forward(self, x): return torch.sparse.mm(x, self.w)*math.inf
    c = case(Sparse)
    c.batches.inputs.clear(), c.batches.notes.clear()
    c.learn.xb = (x,)
    c.batches.add()
    assert diagnose(c).verdict=='divergence'

def test_what_several_ranks_found_is_told_once():
    def report(verdict='forward', producer='a', **kwargs):
        return PrecisionReport(verdict, f'{producer} overflows.', producer=producer, promoted=['a'], new_scale=8., **kwargs)
    assert _merged([None, None])==[]
    one, = _merged([report(), report()])
    assert (one.sentence,one.promoted,one.new_scale)==('a overflows.', ['a'], 8)
    a,b = _merged([None, report(), report(producer='b'), report()])
    assert (a.sentence,b.sentence)==('On ranks 1, 3: a overflows.','On rank 2: b overflows.')
    assert len(_merged([report('data', None, samples=[1]), report('data', None, samples=[2])]))==2

def test_a_look_keeps_what_a_step_keeps():
    "The graph of a look holds no copies of finite numbers for its backward pass, of which a large model would have as many as activations"
    c = case(between(nn.ReLU()))
    def kept(look):
        n = []
        def keep(t):
            n.append(t.numel())
            return t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t): look()
        return sum(n)
    c.fp32 = c.run_fp32()
    assert kept(lambda: c.run(reference=c.fp32))==kept(c.run)>0

@pytest.mark.parametrize('size', [4,8,16])
def test_a_sample_is_of_many_pixels(size):
    "What only one pixel shows is in it, and that of another pixel, too"
    x = torch.arange(size*size).view(size, size).expand(2, 64, size, size).float()
    (seen,),*_ = sampled([('x', x)]).values()
    assert len(seen[0].unique())>min(size*size, 64)*0.8
