"Tables, numbers and lists of the report"

def table(
    head, # Names of columns
    rows, # An iterable of rows, each an iterable of cells
    align='lr' # `l`, `r` or `c` for each column, from the left; the last one is for all further columns, too
) -> str:
    "A Markdown table"
    head = [*head]
    align += align[-1]*(len(head)-len(align))
    rule = [dict(l='---', r='--:', c=':-:')[o] for o in align[:len(head)]]
    return '\n'.join('| '+' | '.join(map(str, o))+' |' for o in (head,rule,*rows))

def with_quartiles(
    q, # First quartile, median and third quartile
    spec='.2f' # How to format each
):
    "The median, and the quartiles in parentheses, unless all look the same"
    first,median,third = (format(o, spec) for o in q)
    return median if first==median==third else f'{median} ({first} to {third})'

def span(xs, spec='.2f'):
    "The smallest and the largest number, or one number if they look the same"
    xs = [*xs]
    low,high = (format(f(xs), spec) for f in (min,max))
    return low if low==high else f'{low} to {high}'

def listed(xs):
    "`a, b and c`"
    *xs,last = map(str, xs)
    return f"{', '.join(xs)} and {last}" if xs else last

def versions(
    libraries:dict # From names to versions
):
    "Libraries with their versions"
    return ', '.join(f'{k} {v}' for k,v in libraries.items())

def ran(
    res:dict, # Results, whose `where` is what differs from what the page says at its top
    *more # What else to say: phrases
):
    "Where and how something ran, as a line; nothing if there is nothing to say"
    said = ', '.join(filter(None, (res['where'],*more)))
    return f'Setup: {said}.' if said else ''

def folded(
    title, # The line to click on
    text # Markdown
):
    "Markdown that shows only a line until you click on it"
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text}\n\n</details>'
