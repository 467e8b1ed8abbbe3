"The README's Python runs as it is written, and what it names exists"
import re
from pathlib import Path
import matplotlib

root = Path(__file__).parent.parent
readme = (root/'README.md').read_text()

def test_snippets():
    matplotlib.use('Agg')
    ns = {}
    for code in re.findall(r'```python\n(.*?)```', readme, re.S): exec(code, ns)
    assert len(ns['learn'].mixed_precision.history)==5*len(ns['dls'].train) and ns['learn'].recorder.values[-1][1]<1
    exec("learn = Learner(dls, small_cnn(), cbs=[DynamicMixedPrecision(), GradientNormClip(1.)])\nlearn.to_bf16_dynamic().to_fp32()", ns)
    exec("learn.to_fp16_dynamic(keep_fp32=[nn.Linear, '0']).to_fp16_dynamic(dynamic=False, init_scale=512.)", ns)

def test_links_and_names():
    for o in re.findall(r'\]\((nbs[^)]*)\)', readme): assert (root/o).exists()
    for module,names in re.findall(r'^\| `(\w+)` \|(.*)\|$', readme, re.M):
        code = (root/f'fastai_amp16/{module}.py').read_text()
        for name in re.findall(r'`(\w+)`', names):
            if name!='fastai_amp16_demo': assert name in code
