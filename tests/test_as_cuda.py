"""What a GPU may change most, in processes that compute as CUDA does; `FASTAI_AMP16_DEVICE=as_cuda uv run pytest` runs all tests so

And what as_cuda.py promises, against CUDA's own rules where these are known, or against what was measured on a GPU."""
import os
from pathlib import Path
import pytest
from processes import in_a_process

root = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif('FASTAI_AMP16_DEVICE' in os.environ, reason='all tests run on that device')

parts = { # what runs there, as arguments of pytest
    'ordinary models': ['test_ordinary.py'],
    'comparisons': ['test_silent.py', '-k', 'nothing_is_said or first_batch and fp16'],
    'healing': ['test_healing.py', '-k', 'silent_overflows or compared_with or checkpoints or hides or now_and_then or ranks_the_producer'],
    'programs': ['test_programs.py', '-k', 'see_true or healed or half_inputs_are_compared'],
    'as in fp32': ['test_same_as_fp32.py', '-k', 'fp32s_way and (transformer or callback_that or gan or one_cycle or mixup)'],
}

code = '''
import contextlib,io,os,sys
os.environ['FASTAI_AMP16_DEVICE'] = 'as_cuda'
import pytest
class Outcomes:
    passed,failed = 0,[]
    def pytest_runtest_logreport(self, report):
        self.passed += report.when=='call' and report.passed
        if report.failed: self.failed.append(f'{{report.nodeid}}: {{report.longreprtext[-600:]}}')
with contextlib.redirect_stdout(io.StringIO()) as out: status = pytest.main({args}, plugins=[seen := Outcomes()])
if seen.failed: raise AssertionError('\\n\\n'.join([f'as on CUDA, {{len(seen.failed)}} fail:', *seen.failed]))
assert status==0 and seen.passed, out.getvalue()
'''

@pytest.mark.parametrize('part', parts)
def test_as_on_cuda(part):
    file,*which = parts[part]
    args = [f'tests/{file}', *which, '-n', '0', '-q', '--no-header', '-p', 'no:cacheprovider']
    in_a_process(code.format(args=args), root)
