"""Look inside prefixes: what they do to attention, how to solve and fit them, what they cost.

Read in this order: lm → attention → models → prefix → mass → methods → session → ui.
Each module imports only modules named before it (tests/test_layers.py holds the table).

Dimension letters in every shape:
    b batch    l layers   h query heads   g key/value heads (g ≤ h)
    q queries  k keys     p prefix slots  d head size   m hidden size   v vocabulary
"""
