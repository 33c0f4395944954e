"""Functions composed at random from a small grammar, for broad traces.

Idea: what a cold start buys on functions that nobody trained on grows with the number of different functions that it
shows, because a policy that meets each only a few times learns to compare the description with the code. Hand-written
templates (broad_templates.py) are too few for that. Here words and code are composed together: each rule gives both,
with the points that a bug may hit, so that the words always say what the right code does.

The grammar is younger than the templates of `generated/unseen-final`.

Everything follows from the number of a draw. `repositories` drops a draw that has the words or the code of a template
of a suite, whose right code raises, or that has a bug which changes no result for random arguments. Trade-off: the
words are stiff, because each rule adds its own to those of its parts.
"""
