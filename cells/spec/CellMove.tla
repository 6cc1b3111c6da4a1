------------------------------ MODULE CellMove ------------------------------
(***************************************************************************)
(* SPDX-License-Identifier: Apache-2.0                                     *)
(*                                                                         *)
(* How one tenant is placed, moved, rolled back, moved back without a      *)
(* copy, and deleted, while it is written to, by drivers that sleep, crash and repeat themselves, over    *)
(* messages that arrive late, again, or never.                             *)
(*                                                                         *)
(* The parties: the routing table (compare-and-set, never fails), drivers, *)
(* and cells. A cell has a database (fence, rows, outbox, relay state,     *)
(* import state: durable, each step one transaction) and a process (gate,  *)
(* a transaction at work, a publication at work: lost in a crash).         *)
(*                                                                         *)
(* Late messages. An order is what a row of the table asks for. Every      *)
(* order of every row that was ever in the table stays deliverable for     *)
(* ever, any number of times, in any order: see sent and the Late actions. *)
(* That is also what any number of drivers can do that read a row, sleep,  *)
(* and wake. What is left of such a driver is that its compare-and-set     *)
(* is refused, because the row's revision has passed; so a driver whose    *)
(* row is not the table's any more counts as one that knows nothing.       *)
(* README.md says what is left out and which weakenings are caught.        *)
(***************************************************************************)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Cells,       \* the cells
    NoCell,      \* no cell
    Default,     \* the cell that serves tenants without a row, at epoch 0, or NoCell
    Drivers,     \* the drivers
    MaxMoves,    \* how many moves may begin
    MaxWrites,   \* how many writes may be acknowledged in one life of the tenant
    MaxDeletes,  \* how many times the tenant may be deleted
    Undo,        \* whether moves ask for an undo window; an undo itself does not
    Weak         \* the names of the rules that are broken; {} is the protocol

ASSUME Default \in Cells \cup {NoCell}

VARIABLES
    route,    \* the tenant's row, with its revision
    drv,      \* what each driver knows: a row, and how far it is with the row's effects
    sent,     \* the orders of all rows that were ever in the table
    fence,    \* at each cell: the tenant's fence (L3), durable
    shut,     \* the cells whose live processes have all closed their gate (L2) for the cut
    tx,       \* a transaction that was admitted and has not committed
    data,     \* at each cell: the writes in its rows, which are also its outbox
    imp,      \* at each cell: how far an import is, durable
    cap,      \* at each cell: the way back that it captures: of which move, from behind which write
    kept,     \* at each cell: the move whose source it was, whose rows nobody has removed
    seq,      \* at each cell: the last event_seq given out there
    pub,      \* at each cell: the last event_seq recorded as published; travels with the rows
    relay,    \* at each cell: whether events (L4) are paused, by which order; a publication at work
    given,    \* the event_seq of each acknowledged write of this life, in the order of commits
    outside,  \* the last event_seq that the world has received in this life
    life,     \* how often the tenant was deleted
    begun     \* how many moves have begun; also the last one's name

tableVars == <<route, drv, sent, life, begun>>
procVars  == <<shut, tx>>
rowVars   == <<data, imp, cap, kept, seq, pub>>
vars == <<route, drv, sent, fence, shut, tx, data, imp, cap, kept, seq, pub, relay, given, outside, life, begun>>

NoMove == 0
NoTx   == [cell |-> NoCell, epoch |-> 0]
Idle   == -1
NoCapture == [move |-> NoMove, from |-> 0]
Max(a, b) == IF a > b THEN a ELSE b
Min(a, b) == IF a < b THEN a ELSE b

-----------------------------------------------------------------------------
(* Rows and what they ask for *)

Absent == [st |-> "ABSENT", cell |-> NoCell, epoch |-> 0, floor |-> 0, move |-> NoMove, src |-> NoCell,
           tgt |-> NoCell, base |-> 0, mark |-> 0, undoes |-> NoMove, res |-> {}, rev |-> 0]

(* An entry of the residue. held: the cell keeps its rows, the changes of back flow to it. *)
Entry(c, e, m, held, back) == [cell |-> c, epoch |-> e, move |-> m, held |-> held, back |-> back]
LetGo(res) == {[x EXCEPT !.held = FALSE] : x \in res}

Nobody  == [row |-> Absent, awake |-> FALSE, k |-> 0, mark |-> 0]
Know(r) == [row |-> r, awake |-> TRUE, k |-> 0, mark |-> 0]

(* An order. kind: open and close a fence; pause and start events; import rows of *)
(* src as they were at any time of the move; finish: import them as they are once *)
(* the source is fenced, verify, and take no import after it; discard rows; return *)
(* what src has taken since the move to the cell that keeps the rows; adopt that   *)
(* cell as the target of an undo.                                                 *)
Order(kind, c, e, f, m, mark, src) ==
    [kind |-> kind, cell |-> c, epoch |-> e, floor |-> f, move |-> m, mark |-> mark, src |-> src]

Preparing(r) == r.st = "ACTIVE" /\ r.move # NoMove
Removable(r) == {x \in r.res : ~x.held \/ "discardHeld" \in Weak}
Settled(r)   == r.st = "ACTIVE" /\ r.move = NoMove

ClaimTarget(r) == IF r.undoes = NoMove THEN Order("close", r.tgt, r.base + 1, 0, r.move, 0, NoCell)
                  ELSE Order("adopt", r.tgt, r.base + 1, 0, r.move, r.undoes, r.src)
ImportOf(r)    == Order("import", r.tgt, r.base + 1, 0, r.move, r.undoes, r.src)
CloseOf(r)     == Order("close", r.cell, r.epoch, 0, r.move, 0, r.cell)
PauseOf(r)     == Order("pause", r.cell, r.epoch, 0, r.move, 0, NoCell)
FinishOf(r)    == Order("finish", r.tgt, r.base + 1, 0, r.move, r.undoes, r.src)
StartOf(r)     == Order("start", r.cell, r.epoch, 0, r.move, r.mark, NoCell)
OpenOf(r)      == Order("open", r.cell, r.epoch, r.floor, r.move, 0, NoCell)
ReturnOf(x)    == Order("return", x.cell, x.epoch, 0, x.move, 0, x.back)
DiscardOf(x)   == Order("discard", x.cell, x.epoch, 0, x.move, 0, NoCell)
EndOf(r)       == LET x == CHOOSE y \in r.res : y.cell = r.cell
                  IN  Order("close", r.cell, r.epoch, 0, x.move, 0, NoCell)

Orders(r) ==
    CASE Preparing(r)         -> {ClaimTarget(r), ImportOf(r)}
      [] Settled(r)           -> {StartOf(r), OpenOf(r)} \cup {DiscardOf(x) : x \in Removable(r)}
                                 \cup {ReturnOf(x) : x \in {y \in r.res : y.held}}
      [] r.st = "COPYING"     -> {CloseOf(r), PauseOf(r), FinishOf(r)}
                                 \cup (IF "openBeforeDecide" \in Weak
                                       THEN {Order("open", r.tgt, r.base + 2, r.base + 2, r.move, 0, NoCell)} ELSE {})
      [] r.st = "COMMITTING"  -> {StartOf(r), OpenOf(r)}
      [] r.st = "DELETING"    -> {EndOf(r)}
      [] r.st = "DELETED"     -> {DiscardOf(x) : x \in r.res}
      [] OTHER                -> {}

(* The epochs at which a process of c may believe that c serves the tenant. *)
Believed(c) == (IF c = Default THEN {0} ELSE {}) \cup {o.epoch : o \in {x \in sent : x.kind = "open" /\ x.cell = c}}

(* The writes acknowledged in this life. *)
Acked == {<<life, i>> : i \in 1 .. Len(given)}

-----------------------------------------------------------------------------
(* The fence: rules of one transaction in a cell's database *)

Admits(c, e)    == fence[c].open /\ fence[c].floor <= e /\ e <= fence[c].epoch
HeldAt(c, e, m) == ~fence[c].open /\ fence[c].epoch = e /\ fence[c].move = m

(* A tenant without a fence row is open at epoch 0. *)
NoFence == [open |-> TRUE, epoch |-> 0, floor |-> 0, since |-> 0, move |-> NoMove]

Reopened(f, o) ==
    [open  |-> TRUE, epoch |-> o.epoch, move |-> NoMove,
     floor |-> IF f.open /\ f.epoch >= o.floor THEN Max(f.floor, o.floor)
               ELSE IF "floorKept" \in Weak THEN o.floor
               ELSE o.epoch,
     since |-> IF f.open THEN f.since ELSE o.epoch]  \* only for I1: open without a break since

ClosedAt(o) == [open |-> FALSE, epoch |-> o.epoch, floor |-> o.epoch, since |-> o.epoch, move |-> o.move]

(* Each is enabled when the cell says yes: the order is carried out, or was before. *)
ApplyOpen(o) ==
    /\ \/ o.epoch > fence[o.cell].epoch
       \/ "fenceTakesOlder" \in Weak
       \/ o.epoch = fence[o.cell].epoch /\ fence[o.cell].open
    /\ fence' = IF o.epoch = fence[o.cell].epoch /\ fence[o.cell].open THEN fence
                ELSE [fence EXCEPT ![o.cell] = Reopened(@, o)]
    /\ kept' = IF fence' = fence THEN kept ELSE [kept EXCEPT ![o.cell] = NoMove]
    /\ UNCHANGED <<data, imp, cap, seq, pub, relay>>

ApplyClose(o) ==
    /\ \/ o.epoch > fence[o.cell].epoch
       \/ "fenceTakesOlder" \in Weak
       \/ HeldAt(o.cell, o.epoch, o.move)
    /\ fence' = [fence EXCEPT ![o.cell] = ClosedAt(o)]
    /\ kept' = IF o.src = o.cell /\ ~HeldAt(o.cell, o.epoch, o.move) THEN [kept EXCEPT ![o.cell] = o.move] ELSE kept
    /\ UNCHANGED <<data, imp, cap, seq, pub, relay>>

(* Waits for a publication that is at work. *)
ApplyPause(o) ==
    LET f == fence[o.cell] r == relay[o.cell] IN
    /\ o.epoch >= f.epoch /\ o.epoch >= r.epoch
    /\ ~(f.open /\ f.epoch = o.epoch)
    /\ r.paused \/ r.epoch # o.epoch
    /\ r.busy = Idle \/ "pauseDoesNotWait" \in Weak
    /\ relay' = [relay EXCEPT ![o.cell].paused = TRUE, ![o.cell].epoch = o.epoch]
    /\ UNCHANGED <<fence, rowVars>>

ApplyStart(o) ==
    /\ o.epoch >= fence[o.cell].epoch /\ o.epoch >= relay[o.cell].epoch
    /\ relay' = [relay EXCEPT ![o.cell].paused = FALSE, ![o.cell].epoch = o.epoch]
    /\ seq' = [seq EXCEPT ![o.cell] = Max(@, o.mark)]
    /\ UNCHANGED <<fence, data, imp, cap, kept, pub>>

(* The first upto writes of the source replace what the import has brought. It is *)
(* refused once the fence has passed the move, once the import is finished, and   *)
(* for rows older than those that are here. Rows that no import of this move has  *)
(* brought are in the way: refused.                                               *)
ApplyImport(o, upto, done) ==
    LET c == o.cell
        i == imp[c]
        mine == i.move = o.move
    IN
    /\ HeldAt(c, o.epoch, o.move) \/ "importWithoutFence" \in Weak
    /\ \/ "importWithoutProgress" \in Weak
       \/ IF mine THEN ~i.done /\ upto >= i.upto ELSE data[c] = {}
    \* An undo goes on from what is there; a copy begins with nothing.
    /\ data' = [data EXCEPT ![c] = IF mine /\ o.mark # NoMove THEN @ \cup {<<life, j>> : j \in i.upto + 1 .. upto}
                                   ELSE {<<life, j>> : j \in 1 .. upto}]
    /\ pub'  = [pub EXCEPT ![c] = Min(upto, pub[o.src])]
    /\ imp'  = [imp EXCEPT ![c] = [move |-> o.move, upto |-> upto, done |-> done]]
    \* The way back begins where the import ends, while nobody writes.
    /\ cap'  = IF done /\ Undo /\ o.mark = NoMove
               THEN [cap EXCEPT ![c] = [move |-> o.move, from |-> IF "captureLate" \in Weak THEN upto + 1 ELSE upto]] ELSE cap
    /\ UNCHANGED <<fence, kept, seq, relay>>

(* What the owner has taken since the move, up to one write, comes to the cell that keeps *)
(* its rows. It is refused once the fence has passed the move, or the rows are gone.       *)
ApplyReturn(o, upto) ==
    LET c == o.cell
        from == IF imp[c].move = o.move THEN imp[c].upto ELSE cap[o.src].from
    IN
    /\ HeldAt(c, o.epoch, o.move) \/ "returnWithoutFence" \in Weak
    /\ kept[c] = o.move \/ "returnAfterRemoval" \in Weak
    /\ cap[o.src].move = o.move
    /\ upto >= from
    /\ data' = [data EXCEPT ![c] = @ \cup {<<life, j>> : j \in from + 1 .. upto}]
    /\ pub'  = [pub EXCEPT ![c] = Max(@, Min(upto, pub[o.src]))]
    /\ imp'  = [imp EXCEPT ![c] = [move |-> o.move, upto |-> upto, done |-> FALSE]]
    /\ UNCHANGED <<fence, cap, kept, seq, relay>>

(* The cell that keeps the rows of move o.mark becomes the target of the undo o.move, *)
(* which goes on where the way back is; if the rows are gone, with a copy.            *)
ApplyAdopt(o) ==
    LET c == o.cell IN
    IF HeldAt(c, o.epoch, o.move) THEN UNCHANGED <<fence, rowVars, relay>>
    ELSE /\ o.epoch > fence[c].epoch
         /\ fence' = [fence EXCEPT ![c] = ClosedAt(o)]
         /\ imp' = IF kept[c] = o.mark
                   THEN [imp EXCEPT ![c] = [move |-> o.move, done |-> FALSE, upto |-> IF @.move = o.mark THEN @.upto ELSE cap[o.src].from]]
                   ELSE imp
         /\ UNCHANGED <<data, cap, kept, seq, pub, relay>>

(* Raises the fence to the loser's epoch if it is lower, and removes everything, the *)
(* counter of events too, while it is closed at exactly that epoch and no publication *)
(* is at work.                                                                        *)
ApplyDiscard(o) ==
    LET c == o.cell IN
    /\ relay[c].busy = Idle
    /\ \/ HeldAt(c, o.epoch, o.move)
       \/ o.epoch > fence[c].epoch
       \/ "discardAnyEpoch" \in Weak /\ ~fence[c].open
       \/ "discardWithoutFence" \in Weak
    /\ fence' = IF o.epoch > fence[c].epoch THEN [fence EXCEPT ![c] = ClosedAt(o)] ELSE fence
    /\ data' = [data EXCEPT ![c] = {}]
    /\ pub'  = [pub EXCEPT ![c] = 0]
    /\ seq'  = [seq EXCEPT ![c] = 0]
    /\ imp'  = [imp EXCEPT ![c] = [move |-> NoMove, upto |-> 0, done |-> FALSE]]
    /\ cap'  = [cap EXCEPT ![c] = NoCapture]
    /\ kept' = [kept EXCEPT ![c] = NoMove]
    /\ relay' = [relay EXCEPT ![c].paused = FALSE]

(* What the source may have been read as: what it held at any time. While an import *)
(* is not refused, every write of this life was made at its source.                *)
Readable == 0 .. Len(given)

-----------------------------------------------------------------------------
(* The drivers. The first group is the routing table's: each is one            *)
(* compare-and-set, and its name is the event of the core (Next).              *)

(* d may write: the table is at the revision of the row that d read. *)
Fresh(d, states) ==
    /\ drv[d].awake /\ drv[d].row.st \in states
    /\ \/ drv[d].row = route
       \/ "casIgnoresRevision" \in Weak /\ drv[d].row.st = route.st

CAS(d, next) ==
    /\ route' = [next EXCEPT !.rev = route.rev + 1]
    /\ sent' = sent \cup Orders(route')
    /\ drv' = [x \in Drivers |->
                 IF x = d THEN Know(route')
                 ELSE IF "casIgnoresRevision" \in Weak THEN drv[x]
                 ELSE Nobody]

(* Once the drain is over, or given up, no gate counts any more. *)
GatesForgotten == shut' = IF route'.st \in {"QUIESCING", "DRAINING"} THEN shut ELSE {}

Elsewhere == GatesForgotten /\ UNCHANGED <<fence, tx, rowVars, relay, outside>>

Claim(d) == \E c \in Cells :
    /\ Fresh(d, {"ABSENT", "DELETED"})
    /\ LET r == drv[d].row IN
       /\ r.st = "ABSENT" => (c = Default \/ Default = NoCell)
       /\ \A x \in r.res : x.cell # c
       /\ CAS(d, [Absent EXCEPT !.st = "ACTIVE", !.cell = c, !.epoch = r.epoch + 1, !.res = r.res,
                                !.floor = IF r.st = "ABSENT" /\ c = Default THEN 0 ELSE r.epoch + 1])
    /\ UNCHANGED <<life, begun, given>> /\ Elsewhere

Begin(d) == \E b \in Cells :
    /\ Fresh(d, {"ACTIVE"})
    /\ begun < MaxMoves
    /\ LET r == drv[d].row
           back == {x \in r.res : x.cell = b /\ x.held}
       IN
       /\ r.move = NoMove /\ b # r.cell
       /\ begun' = begun + 1
       /\ \/ \* A move. A window that is open closes.
             /\ \A x \in r.res : x.cell # b
             /\ CAS(d, [r EXCEPT !.move = begun', !.src = r.cell, !.tgt = b, !.base = r.epoch, !.mark = 0,
                                 !.res = LetGo(@) \cup {Entry(b, r.epoch + 2, begun', FALSE, NoCell)}])
          \/ \* An undo: to the cell that keeps the rows.
             \E x \in back :
             CAS(d, [r EXCEPT !.move = begun', !.src = r.cell, !.tgt = b, !.base = r.epoch, !.mark = 0, !.undoes = x.move,
                              !.res = LetGo(@ \ {x}) \cup {Entry(b, r.epoch + 2, begun', FALSE, r.cell)}])
    /\ UNCHANGED <<life, given>> /\ Elsewhere

Quiesce(d) ==
    /\ Fresh(d, {"ACTIVE"}) /\ drv[d].row.move # NoMove
    /\ CAS(d, [drv[d].row EXCEPT !.st = "QUIESCING"])
    /\ UNCHANGED <<life, begun, given>> /\ Elsewhere

GatesClosed(d) ==
    /\ Fresh(d, {"QUIESCING"})
    /\ CAS(d, [drv[d].row EXCEPT !.st = "DRAINING"])
    /\ UNCHANGED <<life, begun, given>> /\ Elsewhere

Drained(d) ==
    /\ Fresh(d, {"DRAINING"}) /\ drv[d].k = 1
    /\ LET r == drv[d].row IN
       CAS(d, [r EXCEPT !.st = "COPYING", !.epoch = r.base + 1, !.floor = r.base + 1])
    /\ UNCHANGED <<life, begun, given>> /\ Elsewhere

Commit(d) ==
    /\ Fresh(d, {"COPYING"}) /\ drv[d].k = 3
    /\ LET r == drv[d].row IN
       CAS(d, [r EXCEPT !.st = "COMMITTING", !.cell = r.tgt, !.epoch = r.base + 2, !.floor = r.base + 2,
                        !.mark = drv[d].mark])
    /\ UNCHANGED <<life, begun, given>> /\ Elsewhere

(* At any time before the decision: a deadline, an error, an operator. *)
Rollback(d) ==
    /\ \/ Fresh(d, {"QUIESCING", "DRAINING", "COPYING"})
       \/ Fresh(d, {"ACTIVE"}) /\ drv[d].row.move # NoMove
       \/ "rollbackCommitting" \in Weak /\ Fresh(d, {"COMMITTING"}) /\ drv[d].row.cell = drv[d].row.tgt
    /\ LET r == drv[d].row IN
       CAS(d, [r EXCEPT !.st = "COMMITTING", !.cell = r.src, !.epoch = r.base + 2,
                        !.floor = IF r.st = "COPYING" /\ "floorKept" \notin Weak THEN r.base + 2
                                  ELSE IF r.st = "COMMITTING" THEN r.base + 2
                                  ELSE r.base])
    /\ UNCHANGED <<life, begun, given>> /\ Elsewhere

Opened(d) ==
    /\ Fresh(d, {"COMMITTING"}) /\ drv[d].k = 2
    /\ LET r == drv[d].row
           old == {x \in r.res : x.move = r.move}
           ask == Undo /\ r.undoes = NoMove
           new == IF r.cell = r.tgt THEN Entry(r.src, r.base + 1, r.move, ask, IF ask THEN r.tgt ELSE NoCell)
                  ELSE Entry(r.tgt, r.base + 2, r.move, FALSE, IF r.undoes = NoMove THEN NoCell ELSE r.src)
       IN  CAS(d, [r EXCEPT !.st = "ACTIVE", !.move = NoMove, !.src = NoCell, !.tgt = NoCell, !.base = 0, !.undoes = NoMove,
                            !.res = (@ \ old) \cup {new}])
    /\ UNCHANGED <<life, begun, given>> /\ Elsewhere

(* At any time: an operator, a clock, a way back that is lost. *)
WindowClosed(d) == \E x \in drv[d].row.res :
    /\ Fresh(d, {"ACTIVE"}) /\ x.held
    /\ CAS(d, [drv[d].row EXCEPT !.res = LetGo(@)])
    /\ UNCHANGED <<life, begun, given>> /\ Elsewhere

Removed(d) == \E x \in Removable(drv[d].row) :
    /\ Fresh(d, {"ACTIVE", "DELETED"}) /\ drv[d].row.move = NoMove
    /\ \/ drv[d].k = 1 /\ drv[d].mark = x.epoch   \* it is this one that d saw removed
       \/ "removedBeforeDiscard" \in Weak
    /\ CAS(d, [drv[d].row EXCEPT !.res = @ \ {x}])
    /\ UNCHANGED <<life, begun, given>> /\ Elsewhere

Delete(d) ==
    /\ Fresh(d, {"ACTIVE"}) /\ drv[d].row.move = NoMove
    /\ life < MaxDeletes
    /\ begun' = begun + 1   \* the removal needs a name, as a move does
    /\ LET r == drv[d].row IN
       CAS(d, [r EXCEPT !.st = "DELETING", !.epoch = r.epoch + 1, !.floor = r.epoch + 1,
                        !.res = LetGo(@) \cup {Entry(r.cell, r.epoch + 1, begun', FALSE, NoCell)}])
    /\ UNCHANGED <<life, given>> /\ Elsewhere

(* The end of a life: what was acknowledged in it is not owed any more. *)
Deleted(d) ==
    /\ Fresh(d, {"DELETING"}) /\ drv[d].k = 1
    /\ CAS(d, [drv[d].row EXCEPT !.st = "DELETED", !.mark = 0])
    /\ life' = life + 1 /\ given' = <<>> /\ outside' = 0
    /\ GatesForgotten
    /\ UNCHANGED <<begun, fence, tx, rowVars, relay>>

NotTable == UNCHANGED <<fence, procVars, rowVars, relay, given, outside>>

(* A driver starts, or wakes, and reads; or it is gone, with all it knew. *)
Read(d) ==
    /\ ~drv[d].awake
    /\ drv' = [drv EXCEPT ![d] = Know(route)]
    /\ UNCHANGED <<route, sent, life, begun>> /\ NotTable

DriverCrash(d) ==
    /\ drv[d].awake
    /\ drv' = [drv EXCEPT ![d] = Nobody]
    /\ UNCHANGED <<route, sent, life, begun>> /\ NotTable

-----------------------------------------------------------------------------
(* The second group: effects whose success a driver needs to see before it      *)
(* writes. Their names are those of the core's effects.                         *)

Saw(d, st, k) == drv[d].awake /\ drv[d].row.st = st /\ drv[d].k = k
Ack(d, k, mark) == drv' = [drv EXCEPT ![d].k = k, ![d].mark = mark]
OnlyCell == UNCHANGED <<route, sent, life, begun, procVars, given, outside>>

(* The processes of the source have closed their gates and have nothing in flight. *)
Drain(d) ==
    /\ Saw(d, "DRAINING", 0)
    /\ drv[d].row.src \in shut /\ tx.cell # drv[d].row.src
    /\ Ack(d, 1, 0)
    /\ UNCHANGED <<fence, rowVars, relay>> /\ OnlyCell

CloseFence(d) ==
    \/ /\ Saw(d, "COPYING", 0)
       /\ IF "skipFence" \in Weak THEN UNCHANGED <<fence, rowVars, relay>> ELSE ApplyClose(CloseOf(drv[d].row))
       /\ Ack(d, 1, 0) /\ OnlyCell
    \/ /\ Saw(d, "DELETING", 0)
       /\ ApplyClose(EndOf(drv[d].row))
       /\ Ack(d, 1, 0) /\ OnlyCell

PauseEvents(d) ==
    /\ Saw(d, "COPYING", 1)
    /\ IF "skipPause" \in Weak THEN UNCHANGED <<fence, rowVars, relay>> ELSE ApplyPause(PauseOf(drv[d].row))
    /\ Ack(d, 2, seq[drv[d].row.src]) /\ OnlyCell

(* The last rows are applied and both sides compared; or another driver did it. *)
Finish(d) ==
    LET r == drv[d].row IN
    /\ Saw(d, "COPYING", 2)
    /\ IF imp[r.tgt].move = r.move /\ imp[r.tgt].done
       THEN HeldAt(r.tgt, r.base + 1, r.move) /\ UNCHANGED <<fence, rowVars, relay>>
       ELSE ApplyImport(FinishOf(r), Cardinality(data[r.src]), TRUE)
    /\ data'[r.tgt] = data[r.src]
    /\ Ack(d, 3, drv[d].mark) /\ OnlyCell

StartEvents(d) ==
    /\ Saw(d, "COMMITTING", 0)
    /\ ApplyStart(StartOf(drv[d].row))
    /\ Ack(d, 1, 0) /\ OnlyCell

OpenFence(d) ==
    /\ Saw(d, "COMMITTING", 1)
    /\ ApplyOpen(OpenOf(drv[d].row))
    /\ Ack(d, 2, 0) /\ OnlyCell

Discard(d) == \E x \in Removable(drv[d].row) :
    /\ drv[d].awake /\ drv[d].k = 0
    /\ Settled(drv[d].row) \/ drv[d].row.st = "DELETED"
    /\ ApplyDiscard(DiscardOf(x))
    /\ Ack(d, 1, x.epoch) /\ OnlyCell

-----------------------------------------------------------------------------
(* The third group: the same orders, late, again, from drivers that are gone,   *)
(* and from members that reconcile their fences with the routes they read.      *)

Late(o) ==
    /\ CASE o.kind = "open" ->
              \* Whoever opens has started the events at this epoch before.
              /\ relay[o.cell].epoch >= o.epoch \/ "openBeforeStart" \in Weak \/ "openBeforeDecide" \in Weak
              /\ ApplyOpen(o)
         [] o.kind = "close"   -> ApplyClose(o)
         [] o.kind = "pause"   -> ApplyPause(o)
         [] o.kind = "start"   -> ApplyStart(o)
         [] o.kind = "discard" -> ApplyDiscard(o)
         [] o.kind = "adopt"   -> ApplyAdopt(o)
         [] o.kind = "return"  -> \E n \in Readable : ApplyReturn(o, n)
         [] o.kind = "import"  -> \E n \in Readable : ApplyImport(o, n, FALSE)
         [] o.kind = "finish"  -> /\ fence[o.src].epoch >= o.epoch  \* its sender saw it closed
                                  /\ ApplyImport(o, Len(given), TRUE)
    /\ UNCHANGED drv /\ OnlyCell

LateOpenFence   == \E o \in sent : o.kind = "open"    /\ Late(o)
LateCloseFence  == \E o \in sent : o.kind = "close"   /\ Late(o)
LatePauseEvents == \E o \in sent : o.kind = "pause"   /\ Late(o)
LateStartEvents == \E o \in sent : o.kind = "start"   /\ Late(o)
LateAdopt       == \E o \in sent : o.kind = "adopt"   /\ Late(o)
Prepare         == \E o \in sent : o.kind = "import"  /\ Late(o)
Return          == \E o \in sent : o.kind = "return"  /\ Late(o)
LateFinish      == \E o \in sent : o.kind = "finish"  /\ Late(o)
LateDiscard     == \E o \in sent : o.kind = "discard" /\ Late(o)

-----------------------------------------------------------------------------
(* Processes of the cells *)

OnlyProc == UNCHANGED <<tableVars, fence, rowVars, relay, given, outside>>

(* The gate closes: the process sees that its cell is being cut. *)
CloseGates(c) ==
    /\ route.st \in {"QUIESCING", "DRAINING"} /\ route.cell = c
    /\ c \notin shut
    /\ shut' = shut \cup {c}
    /\ UNCHANGED tx /\ OnlyProc

(* Every other gate is trusted with nothing: it admits at any epoch that a process *)
(* of c may believe in, however old.                                               *)
Admit(c) ==
    /\ tx = NoTx /\ c \notin shut
    /\ Len(given) < MaxWrites
    /\ \E e \in Believed(c) : tx' = [cell |-> c, epoch |-> e]
    /\ UNCHANGED shut /\ OnlyProc

(* The transaction reads the fence, under a lock that an order waits for, and     *)
(* commits with its event; the client has its answer.                             *)
Write ==
    /\ tx # NoTx
    /\ Admits(tx.cell, tx.epoch)
    /\ given' = Append(given, seq[tx.cell] + 1)
    /\ seq'   = [seq EXCEPT ![tx.cell] = @ + 1]
    /\ data'  = [data EXCEPT ![tx.cell] = @ \cup {<<life, Len(given) + 1>>}]
    /\ tx' = NoTx
    /\ UNCHANGED <<tableVars, fence, shut, imp, cap, kept, pub, relay, outside>>

(* Fenced: nothing is written. *)
Abort ==
    /\ tx # NoTx
    /\ ~Admits(tx.cell, tx.epoch)
    /\ tx' = NoTx
    /\ UNCHANGED shut /\ OnlyProc

Publish(c) ==
    /\ fence[c].open /\ ~relay[c].paused /\ relay[c].busy = Idle
    /\ \E l \in 0 .. life :
         /\ <<l, pub[c] + 1>> \in data[c]
         /\ relay' = [relay EXCEPT ![c].busy = l]
    /\ UNCHANGED <<tableVars, fence, procVars, rowVars, given, outside>>

(* How far the world is when what c is publishing has reached it. *)
Reached(c) == IF relay[c].busy = life THEN Max(outside, pub[c] + 1) ELSE outside

(* The world has it and the cell has recorded that. *)
Published(c) ==
    /\ relay[c].busy # Idle
    /\ relay' = [relay EXCEPT ![c].busy = Idle]
    /\ pub'   = [pub EXCEPT ![c] = @ + 1]
    /\ outside' = Reached(c)
    /\ UNCHANGED <<tableVars, fence, procVars, data, imp, cap, kept, seq, given>>

(* The process ends: its gate, its transactions and its publication are gone, the  *)
(* latter with or without having reached the world. Another one starts from a      *)
(* snapshot of the routes, which may be as old as it likes, and opens its gate.    *)
CellCrash(c) ==
    /\ c \in shut \/ tx.cell = c \/ relay[c].busy # Idle
    /\ shut' = shut \ {c}
    /\ tx' = IF tx.cell = c THEN NoTx ELSE tx
    /\ relay' = [relay EXCEPT ![c].busy = Idle]
    /\ outside' \in {outside, IF relay[c].busy = Idle THEN outside ELSE Reached(c)}
    /\ UNCHANGED <<tableVars, fence, rowVars, given>>

-----------------------------------------------------------------------------

Init ==
    /\ route = Absent
    /\ drv = [d \in Drivers |-> Nobody]
    /\ sent = {}
    /\ fence = [c \in Cells |-> NoFence]
    /\ shut = {}
    /\ tx = NoTx
    /\ data = [c \in Cells |-> {}]
    /\ imp = [c \in Cells |-> [move |-> NoMove, upto |-> 0, done |-> FALSE]]
    /\ cap = [c \in Cells |-> NoCapture]
    /\ kept = [c \in Cells |-> NoMove]
    /\ seq = [c \in Cells |-> 0]
    /\ pub = [c \in Cells |-> 0]
    /\ relay = [c \in Cells |-> [paused |-> FALSE, epoch |-> 0, busy |-> Idle]]
    /\ given = <<>>
    /\ outside = 0
    /\ life = 0
    /\ begun = 0

Next ==
    \/ \E d \in Drivers :
         \/ Claim(d) \/ Begin(d) \/ Quiesce(d) \/ GatesClosed(d) \/ Drained(d) \/ Commit(d) \/ Rollback(d)
         \/ Opened(d) \/ WindowClosed(d) \/ Removed(d) \/ Delete(d) \/ Deleted(d)
         \/ Read(d) \/ DriverCrash(d)
         \/ Drain(d) \/ CloseFence(d) \/ PauseEvents(d) \/ Finish(d) \/ StartEvents(d) \/ OpenFence(d) \/ Discard(d)
    \/ LateOpenFence \/ LateCloseFence \/ LatePauseEvents \/ LateStartEvents \/ LateAdopt \/ Prepare \/ Return \/ LateFinish \/ LateDiscard
    \/ Write \/ Abort
    \/ \E c \in Cells : CloseGates(c) \/ Admit(c) \/ Publish(c) \/ Published(c) \/ CellCrash(c)

Spec == Init /\ [][Next]_vars

(* Somebody keeps driving: what can be done again and again is done in the end.   *)
(* Nothing is assumed of Begin, Delete, crashes and late messages.                *)
Driven == \A d \in Drivers :
    /\ SF_vars(Read(d)) /\ SF_vars(Rollback(d)) /\ SF_vars(StartEvents(d)) /\ SF_vars(OpenFence(d)) /\ SF_vars(Opened(d))
    /\ SF_vars(CloseFence(d)) /\ SF_vars(Deleted(d))

LiveSpec == Spec /\ Driven

Symmetry == Permutations(Drivers) \cup (IF Default = NoCell THEN Permutations(Cells) ELSE {})

-----------------------------------------------------------------------------
(* Invariants *)

TypeOK ==
    /\ route.st \in {"ABSENT", "ACTIVE", "QUIESCING", "DRAINING", "COPYING", "COMMITTING", "DELETING", "DELETED"}
    /\ route.floor <= route.epoch
    /\ \A c \in Cells : fence[c].floor <= fence[c].epoch /\ pub[c] <= MaxWrites /\ seq[c] <= MaxWrites
    /\ tx.cell \in Cells \cup {NoCell}

(* A transaction could be admitted at c, by whatever process, and commit. *)
CanCommit(c) == \E e \in Believed(c) : Admits(c, e)

(* I1. At most one cell can commit writes of the tenant; it is the one that the  *)
(* table gave the epoch to; and it commits nothing that was admitted before its  *)
(* fence was last closed.                                                        *)
I1 ==
    /\ \A c, d \in Cells : CanCommit(c) /\ CanCommit(d) => c = d
    /\ \A c \in Cells : CanCommit(c) =>
          /\ fence[c].epoch <= route.epoch
          /\ fence[c].epoch = route.epoch /\ route.st # "ABSENT" => c = route.cell
          /\ fence[c].floor >= fence[c].since

(* I2. Whoever can commit has every acknowledged write and nothing of an earlier *)
(* life; and while nobody can, all of them are in one place.                     *)
I2 ==
    /\ \A c \in Cells : CanCommit(c) => data[c] = Acked
    /\ \E c \in Cells : Acked \subseteq data[c]

(* I3. Epochs never decrease: the row's, and every fence's; and one epoch is     *)
(* never given to two cells.                                                     *)
I3 == [][/\ route'.epoch >= route.epoch
         /\ route'.epoch = route.epoch /\ route.st # "ABSENT" => route'.cell = route.cell
         /\ route'.rev >= route.rev
         /\ \A c \in Cells : fence'[c].epoch >= fence[c].epoch]_<<route, fence>>

(* I4. event_seq is 1, 2, 3, ... in the order of commits, whoever commits. The   *)
(* world receives them in order, and no cell is publishing once the table has    *)
(* given the tenant to another.                                                  *)
I4 ==
    /\ \A i \in 1 .. Len(given) : given[i] = i
    /\ outside <= Len(given)
    /\ \A c \in Cells :
         /\ relay[c].busy = life /\ route.st # "ABSENT" => route.cell = c
         /\ CanCommit(c) => pub[c] <= outside

(* I5. COMMITTING only goes forward. *)
I5 == [][route.st = "COMMITTING" /\ route' # route =>
            route'.st = "ACTIVE" /\ route'.cell = route.cell /\ route'.epoch = route.epoch]_route

(* U1. Rows of a cell that takes writes are changed by its own transactions only:  *)
(* no import, no way back and no removal reaches them, however late it is. With I2, *)
(* which holds for who is opened by an undo too: an undo loses nothing.             *)
U1 == [][\A c \in Cells : fence[c].open /\ fence'[c].open /\ data'[c] # data[c] => tx.cell = c]_<<data, fence, tx>>

(* U2. What is held can be undone: the rows are there, and what is missing is captured. *)
U2 == \A x \in route.res : x.held /\ Settled(route) =>
        /\ kept[x.cell] = x.move \/ fence[x.cell].epoch > x.epoch
        /\ cap[x.back].move = x.move
        /\ kept[x.cell] = x.move => Acked \subseteq data[x.cell] \cup {<<life, j>> : j \in cap[x.back].from + 1 .. Len(given)}

(* I6. At any moment, so after any crash, the row alone says who the one home    *)
(* is, and names every other cell that may hold rows: nothing is left behind.    *)
I6 == \A c \in Cells : data[c] # {} =>
        \/ c = route.cell \/ c = route.src
        \/ route.st = "ABSENT" /\ c = Default
        \/ \E x \in route.res : x.cell = c

(* Under LiveSpec: every move and every deletion ends. *)
Ends == (route.st \notin {"ABSENT", "DELETED"} /\ ~Settled(route)) ~> (Settled(route) \/ route.st = "DELETED")

=============================================================================
