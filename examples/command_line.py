"""Options of the command line for the examples; notebooks do not need it.

The settings of an example are the lines ``name = value  # meaning`` of its
first code cell. Each becomes an option: ``batch_size = 256  # rows`` becomes
``--batch-size``, with the meaning as its help.
"""
import argparse
import ast
import re

SETTING = re.compile(r"^(\w+) = (.+?) +# (.+)$", re.MULTILINE)


def parser_for(settings):
    """A parser with an option for each setting of the example whose
    variables are `settings`."""
    with open(settings["__file__"], encoding="utf-8") as file:
        _, title, cell, *_ = file.read().split("# %%", 3)
    parser = argparse.ArgumentParser(
        description=re.search("# # (.+)", title)[1] + ".")
    for name, default, meaning in SETTING.findall(cell):
        parser.add_argument(
            f"--{name.replace('_', '-')}", default=ast.literal_eval(default),
            type=_like(ast.literal_eval(default)),
            help=f"{meaning} (default: {default})".replace("%", "%%"))
    return parser


def read(settings, arguments=None):
    """Replace the settings by what the command line says."""
    settings.update(vars(parser_for(settings).parse_args(arguments)))


def _like(default):
    """What makes a value of an option's text."""
    def entries(text):
        return list(map(number_or_text, text.split(",")))

    def number_or_text(text):
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text
    return entries if isinstance(default, list) else \
        number_or_text if default is None else type(default)
