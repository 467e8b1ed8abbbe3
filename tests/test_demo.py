"What `fastai_amp16_demo` shows"
import subprocess,sys
from pathlib import Path
import pytest
from fastai_amp16.demo import main,parse_args,precisions,spiral,train

def test_accuracy_is_within_a_point_of_fp32():
    fp32,fp16 = [[train(p, 5, seed=seed)[1]['accuracy'] for seed in range(2)] for p in ('fp32','fp16, dynamic')]
    assert min(fp32)>0.97 and sum(fp16)/2==pytest.approx(sum(fp32)/2, abs=0.01)

def test_command(tmp_path):
    "As a user types it"
    exe = Path(sys.executable).parent/'fastai_amp16_demo'
    res = subprocess.run([exe, '--epochs', '1', '--out', tmp_path/'x.png'], capture_output=True, text=True)
    assert res.returncode==0 and 'Warning' not in res.stderr
    table = res.stdout[res.stdout.index(' precision'):res.stdout.index('raw counts')]
    assert table.splitlines()[0].split()==['precision','accuracy','skipped','steps','reruns','loss','scale','seconds']
    for p in precisions: assert p in table
    assert 'valid_loss' in res.stdout and '100.00%' in res.stdout # fastai's progress bars
    assert str(tmp_path/'x.png') in res.stdout and (tmp_path/'x.png').read_bytes()[:4]==b'\x89PNG'

    story = res.stdout[res.stdout.index('raw counts'):]
    for p in spiral: assert p in story
    # told by each fp16 training, and the report
    assert story.count('stem.0 (Conv2d) gives numbers up to')>=3 and '> stem.0' in story and 'keep_fp32=[' in story

def test_healing_ends_where_fp32_ends():
    fp32,healed = [train(p, 8, counts=True)[1]['accuracy'] for p in ('fp32','fp16, healing')]
    assert fp32>0.95 and healed>fp32-0.03 # fp32 itself ends up to three points apart over seeds

@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('name', ['fp16, static scale 512','fp16, dynamic scale'])
def test_without_healing_nothing_is_learned(name): assert train(name, 2, counts=True)[1]['accuracy']<0.3

def test_help(capsys):
    with pytest.raises(SystemExit) as e: main(['--help'])
    out = capsys.readouterr().out
    assert e.value.code==0 and all(o in out for o in ('--epochs','--lr','--bs','--seed','--out','to_fp16_dynamic'))

@pytest.mark.parametrize('args,says', [
    (['--epochs','0'],"--epochs: '0'"), (['--epochs','2.5'],"'2.5'"), (['--lr','-1'],"'-1'"), (['--lr','nan'],"'nan'"),
    (['--lr','inf'],"'inf'"), (['--bs','x'],"--bs: 'x'"), (['--bs','1439'],'at most 1438'), (['--out','x.txt'],'.png'),
    (['--seed','a'],"--seed"), (['--speed'],'--speed'), (['--epochs'],'--epochs')])
def test_wrong_arguments_get_one_line(args, says, capsys):
    with pytest.raises(SystemExit) as e: parse_args(args)
    err = capsys.readouterr().err
    assert e.value.code==2 and err.count('\n')==1 and says in err

@pytest.mark.parametrize('out', ['/nowhere/x.png', '/proc/self/x.png'])
def test_a_picture_that_cannot_be_written_is_told_before_the_training(out, capsys):
    with pytest.raises(SystemExit) as e: main(['--out', out])
    assert repr(out) in e.value.code and 'cannot be written' in e.value.code and not capsys.readouterr().out
