"A report is read at a glance: the same as text and as HTML, whatever modules are called"
import math,os,pickle,re,subprocess,sys
from html.parser import HTMLParser
import matplotlib.pyplot as plt
import pandas as pd
import pytest,torch
from fastai_amp16.diagnosis.report import PrecisionReport,as_html
from fastai_amp16.precision.names import listed

pytestmark = pytest.mark.filterwarnings('error') # pandas announces what it will change

nan = math.nan

def row(module, bits=1., i=0, **kwargs):
    "A row as a diagnosis makes it: numbers, NaN for what was not measured"
    return dict(module=module, type='Linear', computes='float16', input=1., output=2., inside=nan, gradient=3., weight_grad=nan,
                bits=bits, flushed=0., subnormal=0., nonfinite=False, order=i) | kwargs

def report(*rows, verdict='forward', sentence='Found.', **kwargs):
    return PrecisionReport(verdict, sentence, table=pd.DataFrame(rows), **kwargs)

def many(n): return [row(f'm{i}', float(i), i) for i in range(n)]

def sample(**kwargs):
    return report(
        row('body.1', -2.51, 2, type='Square', output=373300., inside=373e3, gradient=2.1e-7, flushed=4e-3, subnormal=.21, nonfinite=True),
        row('', 2.14, 0, type='Net', flushed=nan, subnormal=nan, nonfinite=True),
        row('body.0', 6.74, 1, input=0., weight_grad=0.0019, flushed=5e-5, subnormal=1.),
        row('head', math.inf, 3, computes='fp32', input=0., output=0.),
        **dict(producer='body.1') | kwargs)

class Page(HTMLParser):
    "What is in `html`, which must be well-formed: tags, ids, the cells of the table by row, and which rows have a color"
    def __init__(self, html):
        super().__init__()
        self.open,self.tags,self.ids,self.rows = [],set(),[],[]
        self.feed(html)
        self.close()
        assert not self.open
        self.colored = {int(o) for o in re.findall(r'row(\d+)_col0[^{}]*\{[^}]*rgba\(218', html)}
    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        self.ids += [v for k,v in attrs if k=='id']
        if tag=='tr': self.rows.append([])
        if tag in ('th','td'): self.rows[-1].append('')
    def handle_endtag(self, tag): assert self.open.pop()==tag
    def handle_data(self, data):
        if self.open and self.open[-1] in ('th','td'): self.rows[-1][-1] += data

def lines(r):
    "The table in the text of `r`, header included"
    return str(r).partition('\n\n')[2].splitlines()

def marked(r): return [o.split()[1] for o in lines(r) if o.startswith('> ')]

# %% one content
def header(r): return lines(r)[0].split()

def test_text():
    r = sample(sentence='It broke.', remedy='mend it', done='It was mended.')
    text = str(r).splitlines()
    assert text[:4]==['forward: It broke.', 'Done: It was mended.', 'What you can do: mend it', ''] and repr(r)==str(r)
    assert [o.split() for o in text[4:]]==[
        'module type computes input output inside bits nonfinite'.split(),
        '> body.1 Square float16 1 3.73e+05 3.73e+05 -2.5 not finite'.split(),
        '(the model) Net float16 1 2 2.1 not finite'.split(),
        'body.0 Linear float16 0 2 6.7'.split(),
        'head Linear fp32 0 0 inf'.split()]
    def ends(*words): return {o.index(' '+s)+len(s) for o,s in zip(text[4:], words)}
    assert len(ends('bits','-2.5','2.1','6.7','inf'))==len(ends('computes','float16','float16','float16','fp32'))==1 # in columns
    assert all(o==o.rstrip() for o in text) and [o[2:6] for o in text[4:]]==['modu','body','(the','body','head']

def test_text_of_a_backward_pass():
    assert [o.split() for o in lines(sample(verdict='backward', producer=None))]==[
        'module type computes gradient weight_grad bits flushed subnormal nonfinite'.split(),
        'body.1 Square float16 2.1e-07 -2.5 0.40% 21.00% not finite'.split(),
        '(the model) Net float16 3 2.1 not finite'.split(),
        'body.0 Linear float16 3 0.0019 6.7 <0.01% 100.00%'.split(),
        'head Linear fp32 3 inf – –'.split()]

@pytest.mark.parametrize('kwargs', [{}, dict(producer=None), dict(producer='')], ids=['module','none','model'])
def test_html_says_what_the_text_says(kwargs):
    r = sample(**kwargs)
    head,*rows = Page(r._repr_html_()).rows
    assert head==header(r) and {len(o) for o in rows}=={len(head)}
    assert [' '.join(' '.join(o).split()).replace('▶', '>') for o in rows]==[' '.join(o.split()) for o in lines(r)[1:]]

@pytest.mark.parametrize('producer', ['body.1','','head',None,'gone'])
def test_the_producer_is_marked(producer):
    "By a color and a sign, no other is, and a module that is not in the table is no reason to fail"
    r = sample(producer=producer)
    page = Page(r._repr_html_())
    want = [] if producer in (None,'gone') else [producer or '(the']
    assert not want or lines(r)[1].startswith('> '+want[0]) # on top
    assert marked(r)==want and [o[0][2:] for o in page.rows if o[0].startswith('▶ ')]==[o.replace('(the', '(the model)') for o in want]
    assert [page.rows[1+i][0] for i in page.colored]==[o[0] for o in page.rows if o[0].startswith('▶')]

def shown(r):
    "The modules in the table of `r`, which are the same in text and HTML"
    res = [o[2:].split()[0] for o in lines(r)[1:] if '…' not in o]
    assert res==[o[0].removeprefix('▶ ') for o in Page(r._repr_html_()).rows[1:]]
    return res

@pytest.mark.parametrize('n,at,more', [(10,3,0), (11,None,1), (20,9,10), (20,10,10), (20,19,10), (11,10,1), (1,0,0), (1000,500,990)])
def test_the_producer_is_shown_wherever_it_stands(n, at, more):
    "Of many modules, ten are shown: the producer and those at the top; the rest is counted"
    r = report(*many(n), producer=None if at is None else f'm{at}')
    page,left = r._repr_html_(),f"… and {more} more module{'s' if more>1 else ''}, in "
    names = [f'm{i}' for i in dict.fromkeys([*([] if at is None else [at]), *range(n)])]
    assert shown(r)==names[:10] and marked(r)==names[:at is not None]
    assert str(r).splitlines()[-1].startswith('  '+left+'`.table`')==bool(more) and (left+'<code>.table</code>' in page)==bool(more)
    assert 'and 0 more' not in page+str(r)

@pytest.mark.parametrize('promoted,want', [
    (['m8'], [8,0,1,2]), (['m8','m2'], [2,8,0,1]), (['m7.'], [7,0,1,2]), (['m5'], [5,0,1,2]), (['box'], [13,14,0,1]), (['box.'], [0,1,2,3]),
    (['box.a'], [13,0,1,2]), (['m'], [0,1,2,3]), ([''], [0,1,2,3]), (['.'], [15,0,1,2]), ([], [0,1,2,3])])
def test_what_stays_in_fp32_is_shown(promoted, want):
    "After the producer, with what is inside, and the one with the least room first"
    rows = [*many(13), row('box.a', 13.), row('box.b.c', 14.), row('', 15.)]
    names = [o['module'] or '(the' for o in rows]
    assert [o.replace('(the model)', '(the') for o in _top(report(*rows, promoted=promoted))]==[names[i] for i in want]
    assert _top(report(*rows, producer='m11', promoted=promoted))==['m11', *(names[i] for i in want[:3])]

def _top(r): return [o[2:].split()[0] for o in lines(r)[1:5]]

def test_the_index_of_the_table_is_of_no_account():
    r = sample()
    shuffled = sample()
    shuffled.table.index = [7,7,0,'x']
    assert str(shuffled)==str(r) and shuffled._repr_html_()==r._repr_html_()

every = dict(computes='fp32', inside=5., weight_grad=5., flushed=.1, subnormal=.1, nonfinite=True) # something to see in each column
shared = ['module','type']
matter = dict(
    forward=[*shared, 'computes','input','output','inside','bits','nonfinite'],
    backward=[*shared, 'computes','gradient','weight_grad','bits','flushed','subnormal','nonfinite'],
    healthy=[*shared, 'computes','output','gradient','bits','flushed'],
    weights=[*shared, 'input','output','gradient'],
    divergence=[*shared, 'input','output','gradient','weight_grad'])
matter |= dict(loss=matter['forward'], scale=matter['backward'], data=matter['weights'])

@pytest.mark.parametrize('verdict', matter)
def test_columns_that_matter(verdict):
    r = report(row('a', **every), row('b'), verdict=verdict)
    assert header(r)==Page(r._repr_html_()).rows[0]==matter[verdict] and set(r.table)>set(header(r))
    assert f'<b>{verdict}</b>: ' in r._repr_html_()

@pytest.mark.parametrize('column', every)
def test_what_is_empty_is_left_out(column):
    "In the rows that are shown, and no other"
    rows = many(14)
    def columns(verdict):
        r = report(*rows, producer='m13', verdict=verdict)
        assert header(r)==Page(r._repr_html_()).rows[0]
        return set(every) & set(header(r))
    verdicts = [k for k,v in matter.items() if column in v]
    assert verdicts and not any(map(columns, verdicts))
    rows[12][column] = every[column] # not shown
    assert not any(map(columns, verdicts))
    rows[13][column] = every[column]
    assert all(columns(o)=={column} for o in verdicts)

def test_what_says_something_is_shown():
    "Zeros that are no shares, and a precision that is not the one in question"
    r = report(row('a', gradient=0., flushed=nan), row('b', gradient=0., flushed=0.), verdict='backward')
    assert header(r)=='module type gradient bits'.split()
    assert 'computes' in header(report(row('a', computes='fp32')))
    for dtype,there in ((torch.float16,True), (torch.bfloat16,False)):
        assert ('computes' in header(report(row('a', computes='bfloat16'), dtype=dtype)))==there

@pytest.mark.parametrize('verdict', matter)
def test_a_batch_without_a_backward_pass(verdict):
    r = report(row('a', gradient=nan, flushed=nan, subnormal=nan), verdict=verdict)
    assert {*shared}<={*header(r)}<={*shared,'input','output','bits'} and header(r)==Page(r._repr_html_()).rows[0]

def test_long_names_are_shown_in_full():
    "So that they can be copied to `keep_fp32`"
    names,kind = [f'vision_model.encoder.layers.{i}.self_attn.{k}_proj' for i in range(3) for k in 'qkv'],'NonDynamicallyQuantizableLinear'
    r = report(*(row(n, type=kind, **every) for n in names), verdict='backward', producer=names[5])
    assert marked(r)[0]==names[5] and _top(r)==[names[5],*names[:3]]
    assert {tuple(o[:2]) for o in Page(r._repr_html_()).rows[1:]}=={('▶ '*(n==names[5])+n,kind) for n in names}

@pytest.mark.parametrize('table', [None, pd.DataFrame([]), pd.DataFrame([row('a')])[:0]], ids=['default','empty','no_rows'])
def test_no_rows(table):
    "Words only, and an empty picture"
    r = PrecisionReport('weights', 'Not finite.', 'load another', 'a')
    if table is not None: r.table = table
    assert str(r)=='weights: Not finite.\nWhat you can do: load another'
    page = r._repr_html_()
    assert r.warning=='Not finite. What you can do: load another.'
    assert Page(page).tags=={'p','b'} and 'Not finite.' in page and 'load another' in page
    assert len(r.plot().patches)==0
    plt.close('all')

# %% what was found, what was done, what you can do
@pytest.mark.parametrize('remedy,line', [
    ("keep_fp32=['blocks.3.']", "What you can do: keep_fp32=['blocks.3.']"),
    ('load a checkpoint from before', 'What you can do: load a checkpoint from before'),
    ('GradientNormClip, or a lower rate', 'What you can do: GradientNormClip, or a lower rate'),
    ("To start that way: learn.to_fp16_dynamic(keep_fp32=['a'])", "To start that way: learn.to_fp16_dynamic(keep_fp32=['a'])"),
    ('Load an earlier one.', 'Load an earlier one.'),
    ('learn.a()\nlearn.b()', 'What you can do:\nlearn.a()\nlearn.b()'),
    ('Before you start:\nlearn.a()\nlearn.b()', 'Before you start:\nlearn.a()\nlearn.b()')])
def test_remedies(remedy, line):
    "Code and phrases have words in front, sentences are left alone; statements keep their lines"
    r = sample(remedy=remedy)
    assert str(r).split('\n\n')[0]=='forward: Found.\n'+line and r.warning=='Found. '+line.rstrip('.')+'.'
    words = r._repr_html_().partition('<style')[0].replace('<br>', '\n').replace('</p><p>', '</p>\n<p>')
    assert re.sub('<[^>]*>', '', words)=='forward: Found.\n'+line

@pytest.mark.parametrize('words,text', [
    (('It broke.','It was mended.','Keep it so.'), 'It broke. It was mended. Keep it so.'),
    (('It broke','It was mended','mend it'), 'It broke. It was mended. What you can do: mend it.'),
    (('It broke...','','Mend it. '), 'It broke. Mend it.'),
    (('Is it broken?','a.b now stays in fp32;','') , 'Is it broken? a.b now stays in fp32.'),
    (('Raises: no!','',"keep_fp32=['.']"), "Raises: no! What you can do: keep_fp32=['.'].")])
def test_warning(words, text):
    "What a warning says: a sentence each, with one full stop"
    sentence,done,remedy = words
    r = sample(sentence=sentence, done=done, remedy=remedy)
    assert r.warning==text and (f'\nDone: {done}\n' in str(r))==('<b>Done</b>: '+done in r._repr_html_())==bool(done)

def test_nothing_to_do():
    r = sample(verdict='healthy', producer=None)
    for o in (str(r), r._repr_html_(), r.warning): assert 'Done' not in o and 'What you' not in o and 'None' not in o and '▶' not in o
    assert not marked(r) and r.warning=='Found.'

def test_pandas_options_change_nothing():
    r = report(*many(13), row('m13', type='T'*99, bits=0.123), producer='m13')
    text,page = str(r),r._repr_html_()
    small = {'display.max_rows': 3, 'display.max_columns': 2, 'display.max_colwidth': 5, 'display.width': 20, 'display.precision': 1}
    with pd.option_context(*(o for kv in small.items() for o in kv), 'styler.format.precision', 1):
        assert str(r)==text and r._repr_html_()==page

def test_it_can_be_pickled():
    r = pickle.loads(pickle.dumps(sample(promoted=['a'], dtype=torch.bfloat16)))
    assert str(r)==str(sample()) and r.dtype==torch.bfloat16 and r.promoted==['a'] and r.samples==[]

# %% the code at fault
@pytest.mark.parametrize('op,words', [
    ('masked_fill','torch.finfo'), ('setitem','torch.finfo'), ('div','eps of 1e-4'), ('log','F.log_softmax'),
    ('exp','torch.logsumexp'), ('pow','x.float()'), ('sum','before the sum'), ('matmul','queries')])
def test_a_hint_for_an_operation(op, words):
    "Wherever the report is shown"
    r = sample(op=op, remedy='keep it in fp32')
    line = f'Or, in its code: {r.hint}'
    assert words in r.hint and f'What you can do: keep it in fp32\n{line}\n' in str(r) and r.warning.endswith(f' fp32. {line}.')
    assert '<b>Or, in its code</b>: ' in r._repr_html_()

def test_no_hint():
    "For an operation that needs none, where fp32 fails as well, and where nothing is at fault"
    assert not sample(op='relu').hint and not sample(op='log', verdict='divergence').hint and not sample(producer=None, op=None).hint
    assert not PrecisionReport('loss', 'Found.').hint and 'F.log_softmax' in PrecisionReport('loss', 'Found.', op='log').hint

def test_a_hint_for_one_of_torchs_modules():
    assert '1e-4' in report(row('a', type='CosineSimilarity'), producer='a').hint

# %% HTML
nasty = '<b onclick="x()">&\'</b>'

def test_everything_is_escaped():
    words = dict(sentence=f'{nasty} `{nasty}`', done=f'{nasty} learn.{nasty}()', remedy=f'keep_fp32=[{nasty!r}]')
    r = report(row(nasty, type=nasty[:18], computes=nasty, flushed=1e-5), verdict='backward', producer=nasty, **words)
    html = r._repr_html_()
    page = Page(html)
    assert page.tags=={'p','b','code','style','table','thead','tbody','tr','th','td'} and '<b o' not in html
    assert page.rows[1][:3]==['▶ '+nasty, nasty[:18], nasty] and '<0.01%' in page.rows[1] and '&lt;0.01%' in html

@pytest.mark.parametrize('text,html', [
    ("`exp` in a (B) gives `inf`", "<code>exp</code> in a (B) gives <code>inf</code>"),
    ("keep_fp32=['a.0', 'b.*']", "<code>keep_fp32=['a.0', 'b.*']</code>"),
    ("init_scale=1.04858e+06 starts there", "<code>init_scale=1.04858e+06</code> starts there"),
    ("use init_scale=0.5.", "use <code>init_scale=0.5</code>."),
    ("`to_fp16_dynamic(keep_fp32=['a'])` says so", "<code>to_fp16_dynamic(keep_fp32=['a'])</code> says so"),
    ("a < b & `c<d`", "a &lt; b &amp; <code>c&lt;d</code>"),
    ("Now: learn.a(b=['a'], (1,)) (or not)", "Now: <code>learn.a(b=['a'], (1,))</code> (or not)"),
    ("learn.a()\nlearn.b()", "<code>learn.a()</code><br><code>learn.b()</code>"),
    ("learn.diagnose_fp16 (see there)", "learn.diagnose_fp16 (see there)"),
    ("one ` alone", "one ` alone")])
def test_as_html(text, html):
    assert as_html(text)==html
    for r in (sample(sentence=text), sample(remedy=text)): assert html in r._repr_html_()

def test_the_color_suits_light_and_dark_pages():
    "Text has the color of the page, which shows through the producer's row; nothing else has a color"
    html = sample()._repr_html_()
    assert 'rgba(218,54,51,.22)' in html and html.count('color')==1 and 'color' not in sample(producer=None)._repr_html_()

@pytest.mark.slow
def test_html_is_the_same_in_another_process():
    code = "import sys,pickle; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer)._repr_html_().encode())"
    env = {**os.environ, 'PYTHONHASHSEED': '1' if os.environ.get('PYTHONHASHSEED')!='1' else '2'}
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], input=pickle.dumps(sample()), stdout=subprocess.PIPE, env=env)
    assert res.stdout.decode()==sample()._repr_html_()

def test_two_reports_on_a_page_keep_their_colors():
    "The styles of each refer to its own rows"
    pages = [sample(producer=o)._repr_html_() for o in ('body.1','head')]
    a,b = (Page(o).ids for o in pages)
    assert a and b and not set(a) & set(b) and len(set(a))==len(a)
    for ids,page in zip((a,b), pages): assert {o[1:] for o in re.findall(r'#T_\w+', page)}<=set(ids)

# %% the picture
def colors(ax): return ['red' if o.get_facecolor()[0]>0.5 else 'blue' for o in ax.patches]

def test_plot():
    "A bar for each module, however many, from the first to run at the top to the last"
    ax = sample().plot()
    assert [o.get_text() for o in ax.get_yticklabels()]==['head','body.1','body.0','(the model)']
    assert colors(ax)==['blue','red','blue','blue']
    assert [o.get_width() for o in ax.patches]==pytest.approx([24,-2.51,6.74,2.14]) and '65504' in ax.get_xlabel()
    assert len(report(*many(20)).plot().patches)==20
    plt.close('all')

@pytest.mark.parametrize('producer,want', [('',['blue']*3+['red']), (None,['blue','red','blue','blue']), ('gone',['blue']*4)])
def test_what_is_red(producer, want):
    "The producer; if there is none, what is below 0"
    assert colors(sample(producer=producer).plot())==want
    plt.close('all')

def test_plot_on_given_axes():
    _,ax = plt.subplots()
    n = len(plt.get_fignums())
    assert sample(dtype=torch.bfloat16).plot(ax) is ax and len(ax.patches)==4 and len(plt.get_fignums())==n
    assert '3.38953e+38' in ax.get_xlabel()
    plt.close('all')

# %% words
@pytest.mark.parametrize('os,n,want', [([],5,''), (['a'],5,'a'), ([1,2,3],3,'1, 2, 3'), ([1,2,3,4],3,'1, 2, 3 and 1 more'),
                                       (('a','b','c'),1,'a and 2 more')])
def test_listed(os, n, want): assert listed(os, n)==want

def test_listed_names_five(): assert listed(range(7))=='0, 1, 2, 3, 4 and 2 more'

def test_reports_are_shown_one_below_the_other():
    from fastai_amp16.diagnosis.report import Reports
    a,b = PrecisionReport('healthy', 'First'),PrecisionReport('data', 'Second')
    both = Reports([a, b])
    assert repr(both)==f'{a}\n\n{b}' and both._repr_html_()==a._repr_html_()+b._repr_html_() and repr(Reports())
