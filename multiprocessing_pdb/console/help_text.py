"""The text of `help`."""

HELP = """\
ls                 the stopped ranks: where, why, since when; and notes on collectives
attach R           a whole pdb session with one rank; detach or Ctrl-D leaves it, and it stays stopped
@SELECTION CMD     a pdb command on some ranks, the answers together: @all p loss, @0,2:8:2 up, @tp=1 pp x
                   (ranks, slices, mesh axes, labels); any command below takes a selection too
diff EXPR          evaluates on all ranks and groups equal answers; tensors by form, norm and first difference
diff --golden [EXPR]
                   a value, or all complete tensors, against the expected ones: ranks of moeverify run while they
                   train under a layout, and programs that call set_reference()
where              the stacks of the stopped ranks, equal ones once
step next until return c
                   in lockstep on all stopped ranks, or on a selection
until EXPR         runs until it is true at a line of the function that is stopped in
watch EXPR changes|nan|inf
                   stops at the line of this function after which it holds; watch lists, unwatch [N] ends
stop, stop @tp=1   stops ranks that run, if they are armed or have a breakpoint set
break FILE:LINE [if CONDITION]
                   sets a breakpoint on stopped ranks and on armed ones that run
arm PID, arm all   arms a process, or all ranks of the job, that never called arm(): Python 3.14 and later
interrupt          interrupts an evaluation, or asks those that run to stop
wait N [SECONDS]   waits until N ranks are stopped
stacks             stacks of every process of the job, also of those that run or hang in C
record FILE        writes this session into a page for a bug report; record without a file ends it
replay FILE        does the commands of a recorded session again
kill R             kills the process of a rank
jobs, job NAME     the jobs that have stopped ranks; chooses one
deadline SECONDS   how long each rank has to answer
quit, Ctrl-D       leaves the console; ranks stay stopped
q                  asks: leave, continue all, or kill the job"""
