"`swap_module` replaces modules in place"
import pytest,torch
import torch.nn.functional as F
from torch import nn
from fastai_amp16.all import swap_module

class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.Sigmoid()
        self.deep,self.again,self.none = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sigmoid())),self.act,None
        self.register_module('missing', None)
    def forward(self, x): return self.again(self.deep(self.act(x)))

def test_swap_module():
    m = Tree().eval()
    names = [n for n,_ in m.named_modules(remove_duplicate=False)]
    assert swap_module(m, nn.Sigmoid, nn.Hardsigmoid) is m
    assert [n for n,_ in m.named_modules(remove_duplicate=False)]==names and m.act is m.again
    assert isinstance(m.act, nn.Hardsigmoid) and isinstance(m.deep[1][0], nn.Hardsigmoid) and not any(o.training for o in m.modules())
    x = torch.randn(2, 4)
    assert torch.equal(m(x), F.hardsigmoid(F.hardsigmoid(m.deep[0](F.hardsigmoid(x)))))

def test_swap_module_by_a_function_of_the_old():
    m = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)).to('meta')
    swap_module(m, nn.BatchNorm2d, lambda o: nn.GroupNorm(2, o.num_features))
    assert all(isinstance(o, nn.GroupNorm) and o.num_channels==8 for o in m[1:]) and m[1] is not m[2] and m[1].weight.device.type=='meta'
    swap_module(m, nn.GroupNorm, lambda o: nn.Sequential(o, nn.ReLU())) # what holds the old one
    assert isinstance(m[1][0], nn.GroupNorm)

def test_swap_module_leaves_what_is_never_called():
    m = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=nn.ReLU())
    out_proj = m.self_attn.out_proj
    swap_module(m, nn.Linear, lambda o: nn.Linear(o.in_features, o.out_features))
    assert m.self_attn.out_proj is out_proj
    swap_module(m.self_attn, nn.Linear, lambda o: nn.Linear(o.in_features, o.out_features))
    assert m.self_attn.out_proj is out_proj
    swap_module(m, nn.ReLU, nn.Tanh).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(): fast = m(x)
    assert torch.allclose(fast, m(x), atol=1e-5) # without gradients torch takes a path of its own

@pytest.mark.parametrize('args,error,match', [((nn.Sigmoid(), nn.Sigmoid, nn.Hardsigmoid), ValueError, 'itself'),
    ((Tree(), nn.Tanh, nn.ReLU), ValueError, 'no Tanh in this Tree.*Linear'),
    ((Tree(), nn.Sigmoid, nn.Hardsigmoid()), TypeError, 'a class, or a function'),
    ((Tree(), 'Sigmoid', nn.Hardsigmoid), TypeError, "the class of the modules to replace, nn.Sigmoid, and got 'Sigmoid'"),
    ((Tree(), 'Tree', nn.Hardsigmoid), TypeError, "replace, Tree, and got 'Tree'"),
    ((Tree(), nn.Sigmoid(), nn.Hardsigmoid), TypeError, 'replace, nn.Sigmoid, and got Sigmoid')])
def test_swap_module_says_what_is_wrong(args, error, match):
    with pytest.raises(error, match=match): swap_module(*args)

class Second:
    "Makes a module for the first one, and something else for the others"
    def __init__(self, then): self.then,self.n = then,0
    def __call__(self, old):
        self.n += 1
        return nn.Identity() if self.n==1 else self.then()

def fails(): raise KeyError('no')

@pytest.mark.parametrize('new,error,match', [
    (nn.Linear, ValueError, r'replaces nothing, since Linear, called with no arguments, raised TypeError: .*missing.*function that makes'),
    (lambda: nn.Identity(), ValueError, 'called with the old module, raised TypeError: .*positional'),
    (lambda old: fails(), ValueError, "called with the old module, raised KeyError: 'no'"),
    (lambda old: 3, TypeError, 'made 3, which is not a module'),
    (int, TypeError, 'int made 0, which'),
    (Second(fails), ValueError, 'raised KeyError'),
    (Second(lambda: None), TypeError, 'made None, which')])
def test_a_replacement_that_fails_changes_nothing(new, error, match):
    "Not even what could be replaced"
    class Two(nn.Sequential): pass
    m = Two(nn.Sigmoid(), nn.Sequential(nn.Sigmoid())).eval()
    before = [*m.named_modules()]
    with pytest.raises(error, match=match): swap_module(m, nn.Sigmoid, new)
    assert [*m.named_modules()]==before and not any(o.training for o in m.modules())
