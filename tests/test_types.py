"Type checkers know the public names: by a stub that tools/stubs.py makes"
import subprocess,sys
from pathlib import Path
import pytest
import stubs

root = Path(__file__).parent.parent
program = Path(__file__).with_name('typed.py')

def test_the_stub_is_made_of_the_present_signatures():
    assert stubs.fn.read_text()==stubs.stub(), 'run `uv run python tools/stubs.py`'

def mypy(*args):
    "The errors that mypy finds"
    options = ['--no-incremental', '--ignore-missing-imports', '--no-error-summary', '--python-executable', sys.executable]
    res = subprocess.run([sys.executable, '-m', 'mypy', *options, *args], cwd=root, capture_output=True, text=True)
    assert not res.stderr
    return [o for o in res.stdout.splitlines() if ': note: ' not in o]

wrong = { # code, and what mypy says of it
    "DynamicMixedPrecision(patience='a')": 'Argument "patience" to "DynamicMixedPrecision" has incompatible type "str"',
    "DynamicMixedPrecision(loss_scale=1.)": 'Unexpected keyword argument "loss_scale"',
    "AdamW16([], 1e-3, betas=(.9, .99))": 'Unexpected keyword argument "betas"',
    "AdamW16([], 1e-3, .9)": 'Too many positional arguments',
    "GradientNormClip('1.')": 'Argument 1 to "GradientNormClip" has incompatible type "str"',
    "DynamicMixedPrecision().reports[0].module": '"PrecisionReport" has no attribute "module"',
    "Checkup()[0].module.upper()": 'Item "None" of "str | None" has no attribute "upper"'}

@pytest.mark.slow
def test_mypy_reports_wrong_uses_only(tmp_path):
    bad = tmp_path/'bad.py'
    bad.write_text('\n'.join(['from fastai_amp16.all import *', *wrong]))
    said = mypy(str(stubs.fn), str(program), str(bad))
    assert len(said)==len(wrong) and all(f'bad.py:{i}: error: {what}' in o for i,(what,o) in enumerate(zip(wrong.values(), said), 2)), said
