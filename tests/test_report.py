"A report says the same as text and as HTML, on light and dark pages, wherever the producer stands and whatever modules are called"
import math,os,pickle,re,subprocess,sys
from html.parser import HTMLParser
import matplotlib.pyplot as plt
import pandas as pd
import pytest,torch
from fastai_amp16.report import PrecisionReport,as_html,listed

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
def test_text():
    r = sample(sentence='It broke.', remedy='mend it')
    text = str(r).splitlines()
    assert text[:3]==['forward: It broke.', 'Remedy: mend it', ''] and repr(r)==str(r)
    assert [o.split() for o in text[3:]]==[
        'module type computes bits input output inside gradient weight_grad flushed subnormal nonfinite'.split(),
        '> body.1 Square float16 -2.5 1 3.73e+05 3.73e+05 2.1e-07 0.40% 21.00% not finite'.split(),
        '(the model) Net float16 2.1 1 2 3 not finite'.split(),
        'body.0 Linear float16 6.7 0 2 3 0.0019 <0.01% 100.00%'.split(),
        'head Linear fp32 inf 0 0 3 – –'.split()]
    def ends(*words): return {o.index(' '+s)+len(s) for o,s in zip(text[3:], words)}
    assert len(ends('bits','-2.5','2.1','6.7','inf'))==len(ends('computes','float16','float16','float16','fp32'))==1 # in columns
    assert all(o==o.rstrip() for o in text) and [o[2:6] for o in text[3:]]==['modu','body','(the','body','head']

@pytest.mark.parametrize('kwargs', [{}, dict(producer=None), dict(producer='')], ids=['module','none','model'])
def test_html_says_what_the_text_says(kwargs):
    r = sample(**kwargs)
    head,*rows = Page(r._repr_html_()).rows
    assert head==lines(r)[0].split() and {len(o) for o in rows}=={len(head)}
    assert [' '.join(' '.join(o).split()).replace('▶', '>') for o in rows]==[' '.join(o.split()) for o in lines(r)[1:]]

@pytest.mark.parametrize('producer', ['body.1','','head',None,'gone'])
def test_the_producer_is_marked(producer):
    "By a color and a sign, no other is, and a module that is not in the table is no reason to fail"
    r = sample(producer=producer)
    page = Page(r._repr_html_())
    want = [] if producer in (None,'gone') else [producer or '(the']
    assert marked(r)==want and [o[0][2:] for o in page.rows if o[0].startswith('▶ ')]==[o.replace('(the', '(the model)') for o in want]
    assert [page.rows[1+i][0] for i in page.colored]==[o[0] for o in page.rows if o[0].startswith('▶')]

@pytest.mark.parametrize('n,at,shown,more', [(12,3,12,0), (13,None,12,1), (20,11,12,8), (20,12,13,7), (20,19,13,7), (13,12,13,0)])
def test_the_producer_is_shown_wherever_it_stands(n, at, shown, more):
    "Of many modules, twelve are shown: those at the top"
    producer = None if at is None else f'm{at}'
    r = report(*many(n), producer=producer)
    page,table,left = r._repr_html_(),lines(r),f'… and {more} more'
    names = [f'm{i}' for i in range(min(n, 12))]
    if shown>12: names.append(producer)
    assert [o[2:].split()[0] for o in table[1:1+shown]]==names==[o[0].removeprefix('▶ ') for o in Page(page).rows[1:]]
    assert marked(r)==([] if at is None else [producer])
    assert table[1+shown:]==(['  '+left] if more else []) and (left in page)==bool(more) and 'and 0 more' not in page

def test_the_index_of_the_table_is_of_no_account():
    r = sample()
    shuffled = sample()
    shuffled.table.index = [7,7,0,'x']
    assert str(shuffled)==str(r) and shuffled._repr_html_()==r._repr_html_()

optional = dict(inside=5., weight_grad=5., nonfinite=True)

@pytest.mark.parametrize('column', optional)
def test_what_is_empty_is_left_out(column):
    "In the rows that are shown, and no other"
    rows = many(14)
    def columns():
        r = report(*rows, producer='m13')
        shown = lines(r)[0].split()
        assert shown==Page(r._repr_html_()).rows[0]
        return set(optional) & set(shown)
    assert not columns()
    rows[12][column] = optional[column] # not shown
    assert not columns()
    rows[13][column] = optional[column]
    assert columns()=={column}

def test_a_batch_without_a_backward_pass():
    r = report(row('a', gradient=nan, flushed=nan, subnormal=nan))
    assert lines(r)[0].split()=='module type computes bits input output'.split() and 'gradient' not in Page(r._repr_html_()).rows[0]

@pytest.mark.parametrize('table', [None, pd.DataFrame([]), pd.DataFrame([row('a')])[:0]], ids=['default','empty','no_rows'])
def test_no_rows(table):
    "Words only, and an empty picture"
    r = PrecisionReport('weights', 'Not finite.', 'load another', 'a')
    if table is not None: r.table = table
    assert str(r)=='weights: Not finite.\nRemedy: load another'
    page = r._repr_html_()
    assert Page(page).tags=={'div','p','b'} and 'Not finite.' in page and 'load another' in page
    assert len(r.plot().patches)==0
    plt.close('all')

def test_nothing_to_do():
    r = sample(verdict='healthy', producer=None)
    assert 'Remedy' not in str(r) and 'Remedy' not in r._repr_html_() and not marked(r) and '▶' not in r._repr_html_()

def test_pandas_options_change_nothing():
    r = report(*many(13), row('m13', type='T'*99, bits=0.123), producer='m13')
    text,page = str(r),r._repr_html_()
    small = {'display.max_rows': 3, 'display.max_columns': 2, 'display.max_colwidth': 5, 'display.width': 20, 'display.precision': 1}
    with pd.option_context(*(o for kv in small.items() for o in kv), 'styler.format.precision', 1):
        assert str(r)==text and r._repr_html_()==page

def test_it_can_be_pickled():
    r = pickle.loads(pickle.dumps(sample(promoted=['a'], dtype=torch.bfloat16)))
    assert str(r)==str(sample()) and r.dtype==torch.bfloat16 and r.promoted==['a'] and r.samples==[]

# %% HTML
nasty = '<b onclick="x()">&\'</b>'

def test_everything_is_escaped():
    words = dict(sentence=f'{nasty} `{nasty}`', remedy=f'keep_fp32=[{nasty!r}]')
    r = report(row(nasty, type=nasty, computes=nasty, flushed=1e-5), producer=nasty, **words)
    html = r._repr_html_()
    page = Page(html)
    assert page.tags=={'div','p','b','code','style','table','thead','tbody','tr','th','td'} and '<b o' not in html
    assert page.rows[1][:3]==['▶ '+nasty, nasty, nasty] and '<0.01%' in page.rows[1] and '&lt;0.01%' in html

@pytest.mark.parametrize('text,html', [
    ("`exp` in a (B) gives `inf`", "<code>exp</code> in a (B) gives <code>inf</code>"),
    ("keep_fp32=['a.0', 'b.*']", "<code>keep_fp32=['a.0', 'b.*']</code>"),
    ("init_scale=1.04858e+06 starts there", "<code>init_scale=1.04858e+06</code> starts there"),
    ("use init_scale=0.5.", "use <code>init_scale=0.5</code>."),
    ("`to_fp16_dynamic(keep_fp32=['a'])` says so", "<code>to_fp16_dynamic(keep_fp32=['a'])</code> says so"),
    ("a < b & `c<d`", "a &lt; b &amp; <code>c&lt;d</code>"),
    ("one ` alone", "one ` alone")])
def test_as_html(text, html):
    assert as_html(text)==html
    for r in (sample(sentence=text), sample(remedy=text)): assert html in r._repr_html_()

@pytest.mark.parametrize('verdict', ['healthy','forward'])
def test_colors_suit_light_and_dark_pages(verdict):
    "Text has the color of the page, and backgrounds let the page through"
    html = sample(verdict=verdict, producer=None if verdict=='healthy' else 'body.1')._repr_html_()
    css = [''.join(o) for o in re.findall(r'style="([^"]*)"|\{([^}]*)\}', html)]
    styles = re.findall(r'([\w-]+): *([^;]+)', ';'.join(css))
    assert {v.strip() for k,v in styles if k=='color'}=={'inherit'}
    backgrounds = [v for k,v in styles if k.startswith('background')]
    assert len(backgrounds)>=3 and 'transparent' in ' '.join(backgrounds)
    clear = r'transparent|rgba\(\d+,\d+,\d+,(0?\.[0-4]\d*)\)'
    for v in backgrounds: assert re.fullmatch(rf'({clear}|linear-gradient\(90deg, ({clear}) [\d.]+%, transparent [\d.]+%\))', v), v
    border = dict(styles)['border-left']
    assert ('46,160,67' in border)==(verdict=='healthy') and ('218,54,51' in border)==(verdict!='healthy')

def bars(r):
    "How far the bar of each row reaches, in percent"
    found = re.findall(r'([^{}]*)\{\s*background: linear-gradient\(90deg, rgba\([^)]*\) ([\d.]+)%', r._repr_html_())
    at = {int(i): float(width) for cells,width in found for i in re.findall(r'row(\d+)_col3', cells)}
    return [at.get(i, 0.) for i in range(len(r.table))]

@pytest.mark.parametrize('dtype,top', [(torch.float16,16), (torch.bfloat16,128)])
def test_bars_are_as_long_as_the_room_that_is_left(dtype, top):
    bits = [-math.inf,-3.,0.,top/8,top/2,float(top),2.*top,math.inf]
    assert bars(report(*(row(f'm{i}', b) for i,b in enumerate(bits)), dtype=dtype))==pytest.approx([0,0,0,12.5,50,100,100,100], abs=0.1)

def test_html_is_the_same_in_another_process():
    code = "import sys,pickle; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer)._repr_html_().encode())"
    env = {**os.environ, 'PYTHONHASHSEED': '1' if os.environ.get('PYTHONHASHSEED')!='1' else '2'}
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], input=pickle.dumps(sample()), stdout=subprocess.PIPE, env=env)
    assert res.stdout.decode()==sample()._repr_html_()

def test_two_reports_on_a_page_keep_their_colors():
    "The styles of each refer to its own rows, and what has an id has a style"
    pages = [sample(producer=o)._repr_html_() for o in ('body.1','head')]
    a,b = (Page(o).ids for o in pages)
    assert a and b and not set(a) & set(b) and len(set(a))==len(a)
    for ids,page in zip((a,b), pages): assert {o[1:] for o in re.findall(r'#T_\w+', page)}==set(ids)

def test_words_stand_left_and_numbers_right():
    html = sample()._repr_html_()
    left = {int(o) for o in re.findall(r'\.col(\d+) \{\s*text-align: left;', html)}
    assert [o for i,o in enumerate(Page(html).rows[0]) if i in left]==['module','type','computes','nonfinite']
    assert re.findall(r'(td|th) \{[^}]*text-align: (\w+)', html)==[('th','right'),('td','right')]

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
