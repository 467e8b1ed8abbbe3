"""What a GPU may change most, in processes that compute as CUDA does; `FASTAI_AMP16_DEVICE=as_cuda uv run pytest` runs all tests so

And, in one of these, that as_cuda.py has the habits it promises: dtypes against those that PyTorch gives fake CUDA tensors."""
import json
from pathlib import Path
import pytest,torch
import torch.nn.functional as F
from fastai.basics import nn
from torch.nn.attention import SDPBackend,sdpa_kernel
import as_cuda
from conftest import asked
from test_fake_cuda import fp32_ops,half_ops,widest_ops

root = Path(__file__).parents[1]
f16,bf16,f32 = torch.float16,torch.bfloat16,torch.float32

# %% in other processes
parts = { # what runs there: patterns of names, by file; each file belongs to one part
    'habits': {'as_cuda': ''},
    'random numbers, and averages of weights': dict.fromkeys(['comparable','entry'], 'depend_on|Averaged'),
    'ordinary models': {'ordinary': ''},
    'comparisons': {'silent': 'first_batch.*fp16|nothing_is_said.*(dropout|augmentation|recurren|attention)'},
    'healing': {'healing': 'silent_overflows|compared_with|checkpoints|hides|now_and_then|ranks_the_producer'},
    'programs': {'programs': 'see_true|healed|half_inputs_are_compared'},
    'other clients': {'clients': 'closure|hook|transform|control|writes|healed'},
    'as in fp32': {'same_as_fp32': 'fp32s_way.*(transformer|callback_that|gan|one_cycle|mixup)'},
}

code = '''
import contextlib,io,json,os,re
os.environ['FASTAI_AMP16_DEVICE'] = 'as_cuda'
import pytest
parts = {parts}
def part_of(nodeid):
    "The part that runs a test"
    path,name = nodeid.split('::', 1)
    file = path.rpartition('test_')[-1][:-3]
    return next((k for k,files in parts.items() if file in files and re.search(files[file], name)), None)
class Outcomes:
    def __init__(self): self.passed,self.failed = dict.fromkeys(parts, 0),{{k: [] for k in parts}}
    def pytest_collection_modifyitems(self, items): items[:] = [o for o in items if part_of(o.nodeid)]
    def pytest_runtest_logreport(self, report):
        part = part_of(report.nodeid)
        self.passed[part] += report.when=='call' and report.passed
        if report.failed: self.failed[part].append(f'{{report.nodeid}}: {{report.longreprtext[-600:]}}')
files = [f'tests/test_{{o}}.py' for files in parts.values() for o in files]
options = ['-n', '0', '-q', '--no-header', '-p', 'no:cacheprovider']
with contextlib.redirect_stdout(io.StringIO()) as out: pytest.main(files+options, plugins=[seen := Outcomes()])
failed = {{k: seen.failed[k] or ([] if n else [out.getvalue()]) for k,n in seen.passed.items()}}
with open({path!r}, 'w') as f: json.dump(failed, f)
'''

@pytest.fixture(scope='module')
def failed(tmp_path_factory, in_a_process):
    "What failed by part, all of them in one process that computes as CUDA does"
    path = tmp_path_factory.mktemp('as_cuda')/'failed.json'
    in_a_process(code.format(parts=parts, path=str(path)), root)
    return json.loads(path.read_text())

@pytest.mark.skipif(asked!='cpu', reason='all tests run so')
@pytest.mark.parametrize('part', parts)
def test_as_on_cuda(part, failed): assert not failed[part], '\n\n'.join(failed[part])

# %% habits
has_habits = pytest.mark.skipif(not asked.startswith('as_cuda'), reason='this process computes as a CPU does')

def dtype(op, *dtypes):
    "Of what `op` gives under autocast to fp16"
    with torch.autocast('cpu', f16): return op(*[torch.ones(4, 4, dtype=o) for o in dtypes]).dtype

@has_habits
@pytest.mark.parametrize('given', [f16,f32], ids=str)
def test_operations_follow_cudas_lists(given):
    "test_fake_cuda.py sees the same of fake CUDA tensors"
    assert {k: dtype(op, given) for k,op in half_ops.items()}==dict.fromkeys(half_ops, f16)
    assert {k: dtype(op, given) for k,op in fp32_ops.items()}==dict.fromkeys(fp32_ops, f32)
    assert {k: dtype(op, f16, given, f16) for k,op in widest_ops.items()}==dict.fromkeys(widest_ops, given)

@has_habits
def test_what_only_a_cpu_casts_stays_as_it_is():
    def padded(x): return F.pad(x[None], (1,1), "replicate")
    def stack(x, y): return torch.stack([x, y])
    assert dtype(padded, f16)==f16 and dtype(stack, f16, f32)==f32
    with pytest.raises(RuntimeError, match='unsafe to autocast'): dtype(lambda x: F.binary_cross_entropy(x, x), f32)

def mask(draw, dtype):
    "Which of many ones are left"
    torch.manual_seed(0)
    return draw(torch.ones(1, 1, 64, 64, dtype=dtype))!=0

def agree(draw):
    "How often masks in half precision are those in fp32"
    return [(mask(draw, o)==mask(draw, f32)).float().mean().item() for o in (f32,f16,bf16)]

def dropped(x): return F.dropout(x, 0.5)
def attended(x): return F.scaled_dot_product_attention(x, x, torch.eye(64, dtype=x.dtype)[None,None], dropout_p=0.5)
def attended_in_steps(x):
    with sdpa_kernel(SDPBackend.MATH): return attended(x)

@has_habits
@pytest.mark.parametrize('draw', [dropped,attended])
def test_masks_in_half_precision_are_not_those_in_fp32(draw):
    same,fp16,bfloat16 = agree(draw)
    assert same==1 and fp16==pytest.approx(0.5, abs=0.05) and bfloat16==pytest.approx(0.5, abs=0.05)

@has_habits
def test_attention_in_steps_draws_in_fp32(): assert agree(attended_in_steps)==[1,1,1]

@has_habits
@pytest.mark.parametrize('kwargs', [{}, dict(is_causal=True), dict(scale=0.3), dict(attn_mask=torch.ones(64, 64).tril()>0),
                                    dict(attn_mask=-torch.arange(64.).expand(64, 64))], ids=str)
def test_attention_is_pytorchs_but_for_its_masks(kwargs):
    "Output and gradient, where hardly anything is dropped"
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 8, requires_grad=True)
    def run(p):
        out = F.scaled_dot_product_attention(x, x, x, dropout_p=p, **kwargs)
        return out,torch.autograd.grad(out.square().sum(), x)[0]
    for a,b in zip(run(1e-9), run(0.)): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

@has_habits
@pytest.mark.parametrize('rnn', [nn.LSTM,nn.GRU,nn.RNN])
def test_recurrent_layers_compute_in_fp16(rnn):
    "Under any autocast; without one in the dtype of their weights"
    net,x = rnn(8, 8),torch.randn(5, 2, 8)
    with torch.autocast('cpu', bf16): assert net(x)[0].dtype==f16
    with torch.autocast('cpu', f16): assert net(x)[0].dtype==f16
    assert net.bfloat16()(x.bfloat16())[0].dtype==bf16

@has_habits
def test_no_seed_rewinds_the_dropout_of_recurrent_layers():
    net,x = nn.LSTM(8, 8, 2, dropout=0.5),torch.randn(5, 2, 8)
    def out():
        torch.manual_seed(0)
        return net(x)[0]
    assert not torch.equal(out(), out()) and torch.equal(net.eval()(x)[0], net(x)[0])

@pytest.mark.cpu_only('the rounding is that of as_cuda.py')
def test_tf32_has_ten_bits():
    x = torch.randn(1000)
    y = as_cuda.rounded(x)
    assert torch.equal(y.view(torch.int32)&0x1fff, torch.zeros(1000, dtype=torch.int32)) and torch.equal(as_cuda.rounded(y), y)
    assert 0<((y-x)/x).abs().max()<=2**-11
