"What `fastai_amp16_demo` shows"
import functools,runpy,sys,warnings
from contextlib import redirect_stderr,redirect_stdout
from io import StringIO
from pathlib import Path
import pytest,torch
from fastcore.script import CliError,anno_parser
import fastai_amp16.demo as demo
from fastai_amp16.demo import main,train,trainings

exe = Path(sys.executable).parent/'fastai_amp16_demo'

def accuracy(*args, **kwargs): return train(*args, **kwargs)[1]['accuracy']

@pytest.mark.slow
def test_accuracy_is_within_a_point_of_fp32():
    fp32,fp16 = [[accuracy('digits', p, 5, seed=seed) for seed in range(2)] for p in ('fp32','to_fp16_dynamic()')]
    assert min(fp32)>0.97 and sum(fp16)/2==pytest.approx(sum(fp32)/2, abs=0.01)

@pytest.fixture(scope='module')
def told(tmp_path_factory):
    "What the command prints, as a user types it, and where its picture is by default"
    d = tmp_path_factory.mktemp('demo')
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setattr(sys, 'argv', [str(exe), '--epochs', '1'])
        patch.setenv('COLUMNS', '80')
        patch.chdir(d)
        with warnings.catch_warnings(record=True) as told: # a process of its own would print these
            warnings.simplefilter('always')
            with pytest.raises(SystemExit) as e: runpy.run_path(str(exe), run_name='__main__')
    assert not e.value.code and not err.getvalue() and not told
    return out.getvalue(),d/'fastai_amp16_demo.png'

def test_command_prints_one_table(told):
    header,*rows = told[0].split('\n\n')[1].splitlines()
    assert header.split()==['data','precision','accuracy','epochs','skipped','reruns','loss','scale','seconds']
    assert len({*map(len, [header, *rows])})==1 and [(r[:11].strip(),r[11:31].strip()) for r in rows]==[
        (data,o) for data,ways in trainings.items() for o in ways]
    assert [r.split()[-4] for r in rows]==[*'00000','22','0']

def test_a_hopeless_training_ends_after_its_first_epoch():
    "torch's scale halves at each of its steps, and all of them are skipped"
    learn,row = train('raw counts', "fastai's to_fp16()", epochs=3)
    assert (row['epochs'],row['skipped'],row['loss scale'])==(1,22,2.**-5) and learn.mixed_precision.history.skipped.all()

def test_command_says_which_training_ended_early(told):
    assert "fastai's to_fp16() on raw counts: all 22 steps" in told[0].split('\n\n')[2]

def test_command_prints_a_sentence_per_finding(told):
    findings = told[0].split('\n\n')[3].splitlines()[1:]
    assert findings[0].startswith('- `stem.0` (Conv2d) gives numbers up to') and all(o[:2] in ('- ','  ') for o in findings)
    assert max(map(len, told[0].splitlines()[:-1]))<=80

def test_command_prints_reports_where_asked(told, tmp_path, monkeypatch, capsys):
    for data,precision in (('digits','fp32'), ('raw counts','to_fp16_dynamic()')): monkeypatch.setitem(trainings, data, (precision,))
    main(epochs=1, reports=True, out=tmp_path/'x.png')
    short,long = told[0],capsys.readouterr().out
    assert '> stem.0' not in short and 'keep_fp32=[' not in short
    assert '> stem.0' in long and 'keep_fp32=[' in long

def test_command_says_where_the_picture_is(told):
    text,path = told
    assert text.splitlines()[-1].endswith(f': {path}') and path.read_bytes()[:4]==b'\x89PNG'

trained = functools.cache(train)

@pytest.mark.parametrize('fp16,bf16,says', [
    (1.4,1.5,''), (4.,1.5,'Slow here: fp16 (4.0 times fp32\'s seconds). Compare on a GPU.'),
    (4.,6.,'Slow here: fp16 (4.0 times fp32\'s seconds) and bf16 (6.0 times fp32\'s seconds).')])
def test_what_is_slow_is_what_took_long(fp16, bf16, says, monkeypatch, capsys, tmp_path):
    seconds = {'fp32': 1., 'to_fp16_dynamic()': fp16, 'to_bf16_dynamic()': bf16}
    def timed(data, precision, **kwargs):
        learn,row = trained(data, 'fp32' if data=='digits' else precision, epochs=1)
        return learn,{**row, 'precision': precision, 'seconds': seconds[precision]}
    monkeypatch.setitem(trainings, 'digits', tuple(seconds))
    monkeypatch.setitem(trainings, 'raw counts', ('to_fp16_dynamic()',))
    monkeypatch.setattr(demo, 'train', timed)
    monkeypatch.setattr(demo, 'default_device', lambda: torch.device('cpu'))
    main(epochs=1, out=tmp_path/'x.png')
    out = capsys.readouterr().out
    assert says in ' '.join(out.split()) and ('Slow here' in out)==bool(says) and max(map(len, out.splitlines()[:-1]))<=80

def test_help():
    text = anno_parser(main).format_help()
    assert all(o in text for o in ('--epochs','--lr','--bs','--seed','--out','--reports','fp16'))

@pytest.mark.parametrize('words,says', [
    (['--epochs','2.5'],"--epochs: invalid int value: '2.5'"), (['--bs','x'],"--bs: invalid int value: 'x'"), (['--seed','a'],'--seed'),
    (['--speed'],'unrecognized arguments: --speed'), (['--epochs'],'--epochs: expected one argument')])
def test_wrong_words(words, says, capsys):
    with pytest.raises(SystemExit) as e: anno_parser(main).parse_args(words)
    assert e.value.code==2 and says in capsys.readouterr().err.splitlines()[-1]

@pytest.mark.parametrize('kwargs,says', [
    (dict(epochs=0),'--epochs must be above 0'), (dict(lr=-1.),'--lr must be above 0'), (dict(lr=float('nan')),'is nan'),
    (dict(lr=float('inf')),'is inf'), (dict(bs=1439),'--bs must be from 1 to 1438'), (dict(out='x.txt'),'.png'),
    (dict(out='/nowhere/x.png'),'cannot be written'), (dict(out='/proc/self/x.png'),'cannot be written')])
def test_wrong_arguments_are_told_before_the_training(kwargs, says, capsys):
    with pytest.raises(CliError) as e: main(**kwargs)
    assert says in str(e.value) and '\n' not in str(e.value) and not capsys.readouterr().out

def test_what_a_user_reads_who_types_a_wrong_number(monkeypatch, capsys):
    "The command as it is installed, in this process: Python prints what it exits with to stderr, and 1 is its status"
    monkeypatch.setattr(sys, 'argv', [str(exe), '--epochs', '0'])
    with pytest.raises(SystemExit) as e: runpy.run_path(str(exe), run_name='__main__')
    assert (e.value.code,*capsys.readouterr())==('--epochs must be above 0, and is 0.','','')
