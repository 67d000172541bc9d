"""Random networks, and random things that users do to them between steps.

`programs.programs` is the strategy, by hypothesis, of a `Program`: one or two
networks, one to four devices, and `Action`s. `run` performs the actions with
mgpu and with the framework's own loop on one device, and compares losses,
weights, statistics and predictions. Numbers are equal, or mgpu raises an error
of `runner.REFUSALS` and changes nothing. An action is drawn with all
others known, so that a program is a value: it can be counted without being
run, it shrinks, and its text is code that runs it again. (A
``RuleBasedStateMachine`` draws an action when the one before has been run,
and leaves kinds of actions out at random.)

Run: programs of each kind (backend, one network or two), with the number of
errors by reason; a failure is shrunk and printed as code::

    python -m tests.generated --cases 200
    python -m tests.generated --backend torch --seed 3 --cases 500
    python -m pytest tests/generated

Reproduce: the same seed draws the same programs, and pytest draws the same
ones in every run. Or run the code that was printed::

    from tests.generated import Action, Network, Program, run
    run(Program(backend='torch', actions=(Action('train_batch', rows=1),)))

Shrink: ``search(programs("torch"), fails, 100)`` returns the smallest program
for which ``fails(program)`` is true.

Extend: a layer is a kind in `programs`, with an entry of ``LEAVES`` in each
adapter; an action is a method of `runner.Run`, with its arguments in
`programs.actions`.

``python -m tests.generated.interrupts --count 1000`` presses Ctrl-C at random
moments.
"""
from .programs import Action, Network, Program, programs
from .runner import Failure, run
from .search import search

__all__ = ["Action", "Failure", "Network", "Program", "programs", "run",
           "search"]
