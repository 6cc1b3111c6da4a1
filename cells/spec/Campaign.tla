------------------------------ MODULE Campaign ------------------------------
(***************************************************************************)
(* SPDX-License-Identifier: Apache-2.0                                     *)
(*                                                                         *)
(* How one campaign is driven: a stored plan, drivers that sleep, crash and *)
(* are replaced at any time, an operator who pauses, aborts, tries again    *)
(* and moves tenants by hand. A move itself is one step here that commits   *)
(* or rolls back: CellMove.tla says why it may be taken for one.            *)
(*                                                                         *)
(* The store has the campaign, its items, the records of moves, and the     *)
(* name of the driver. Each action is one transaction of the store, or one  *)
(* step of a driver that remembers what it has read. No clock is in it: the  *)
(* driver's name is taken over at any time, also from the living.           *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Items,      \* the moves of the plan, one tenant each
    Drivers,    \* the directories
    Nobody,     \* no driver
    MaxAttempts,\* how often an item may be begun
    MaxHands,   \* how often the operator moves a tenant by hand
    Weak        \* the names of the rules that are broken; {} is the protocol

VARIABLES
    camp,    \* the campaign's state
    driver,  \* who drives it
    item,    \* each item: its state and its attempt
    rec,     \* the records of moves, by item and attempt
    loc,     \* where each tenant is: "from" (its source), "to" (its target), "away"
    made,    \* how often each attempt has moved its tenant
    mind,    \* what each driver has read and not yet acted upon
    hands    \* how often the operator has moved a tenant

vars == <<camp, driver, item, rec, loc, made, mind, hands>>

Attempts == 1 .. MaxAttempts
Moves    == Items \X Attempts
Idle     == [pc |-> "idle", i |-> Nobody, att |-> 0]
Final    == {"MOVED", "FAILED", "SKIPPED"}
Over     == {"done", "back"}
Of(i)    == <<i, item[i].att>>

Init ==
    /\ camp = "PLANNED" /\ driver = Nobody /\ hands = 0
    /\ item = [i \in Items |-> [st |-> "PENDING", att |-> 0]]
    /\ rec = [m \in Moves |-> "none"] /\ made = [m \in Moves |-> 0]
    /\ loc = [i \in Items |-> "from"]
    /\ mind = [d \in Drivers |-> Idle]

Running == {i \in Items : item[i].st = "RUNNING"}
Driven  == camp \in {"RUNNING", "ABORTING"} \/ Running # {}

-----------------------------------------------------------------------------
(* The operator *)

Run    == camp = "PLANNED" /\ camp' = "RUNNING" /\ UNCHANGED <<driver, item, rec, loc, made, mind, hands>>
Pause  == camp = "RUNNING" /\ camp' = "PAUSED" /\ UNCHANGED <<driver, item, rec, loc, made, mind, hands>>
Resume == camp = "PAUSED" /\ camp' = "RUNNING" /\ UNCHANGED <<driver, item, rec, loc, made, mind, hands>>
Abort  == camp \in {"PLANNED", "RUNNING", "PAUSED"} /\ camp' = "ABORTING" /\ UNCHANGED <<driver, item, rec, loc, made, mind, hands>>

Retry ==
    /\ camp \in {"RUNNING", "PAUSED", "DONE"} /\ camp' = "RUNNING"
    /\ \E i \in Items : item[i].st = "FAILED"
    /\ item' = [i \in Items |-> IF item[i].st = "FAILED" /\ item[i].att < MaxAttempts THEN [item[i] EXCEPT !.st = "PENDING"] ELSE item[i]]
    /\ UNCHANGED <<driver, rec, loc, made, mind, hands>>

(* Somebody moves a tenant without the campaign; never while a move of it runs. *)
Hand(i) ==
    /\ hands < MaxHands /\ \A a \in Attempts : rec[<<i, a>>] # "active"
    /\ \E l \in {"from", "to", "away"} \ {loc[i]} : loc' = [loc EXCEPT ![i] = l]
    /\ hands' = hands + 1 /\ UNCHANGED <<camp, driver, item, rec, made, mind>>

-----------------------------------------------------------------------------
(* Drivers *)

Take(d) ==
    /\ Driven /\ driver # d /\ driver' = d
    /\ UNCHANGED <<camp, item, rec, loc, made, mind, hands>>

Crash(d) == mind[d] # Idle /\ mind' = [mind EXCEPT ![d] = Idle] /\ UNCHANGED <<camp, driver, item, rec, loc, made, hands>>

(* The item is RUNNING, under the name of its move, before anything is recorded. *)
Begin(d, i) ==
    /\ mind[d] = Idle /\ camp = "RUNNING" /\ driver = d
    /\ item[i].st = "PENDING" /\ item[i].att < MaxAttempts
    /\ item' = [item EXCEPT ![i] = [st |-> "RUNNING", att |-> @.att + 1]]
    /\ mind' = [mind EXCEPT ![d] = [pc |-> "begun", i |-> i, att |-> item[i].att + 1]]
    /\ UNCHANGED <<camp, driver, rec, loc, made, hands>>

(* Somebody who drives, or did, finds an item RUNNING without a record. *)
Look(d, i) ==
    /\ mind[d] = Idle /\ item[i].st = "RUNNING" /\ rec[Of(i)] = "none"
    /\ mind' = [mind EXCEPT ![d] = [pc |-> "begun", i |-> i, att |-> item[i].att]]
    /\ UNCHANGED <<camp, driver, item, rec, loc, made, hands>>

(* Does the plan still fit? The answer may be old when it is acted upon. A target *)
(* that is closed makes a plan that does not fit of one that does: either is possible. *)
Fit(d) ==
    /\ mind[d].pc = "begun"
    /\ \E pc \in (IF loc[mind[d].i] = "from" /\ camp # "ABORTING" THEN {"fits", "unfit"} ELSE {"unfit"}) :
           mind' = [mind EXCEPT ![d].pc = pc]
    /\ UNCHANGED <<camp, driver, item, rec, loc, made, hands>>

Waits(d) == item[mind[d].i] = [st |-> "RUNNING", att |-> mind[d].att]

(* Records the move, once, while the item waits for it and no other move of the tenant runs. *)
Record(d) ==
    LET m == <<mind[d].i, mind[d].att>> IN
    /\ mind[d].pc = "fits"
    /\ rec' = IF /\ (rec[m] = "none" \/ ("recordedTwice" \in Weak /\ rec[m] \in Over))
                 /\ (Waits(d) \/ "recordsLookAtNoItem" \in Weak)
                 /\ \A a \in Attempts : rec[<<mind[d].i, a>>] # "active"
              THEN [rec EXCEPT ![m] = "active"] ELSE rec
    /\ mind' = [mind EXCEPT ![d] = Idle]
    /\ UNCHANGED <<camp, driver, item, loc, made, hands>>

(* Gives an item that does not fit its result, or puts it back, while no move is recorded. *)
Unfit(d) ==
    LET m == <<mind[d].i, mind[d].att>> IN
    /\ mind[d].pc = "unfit"
    /\ \E st \in {"SKIPPED", "FAILED", "PENDING"} :
           item' = IF Waits(d) /\ (rec[m] = "none" \/ "resultsLookAtNoMove" \in Weak)
                   THEN [item EXCEPT ![mind[d].i].st = st] ELSE item
    /\ mind' = [mind EXCEPT ![d] = Idle]
    /\ UNCHANGED <<camp, driver, rec, loc, made, hands>>

(* The move ends. It commits only from the cell that the plan names. *)
Commit(m) ==
    /\ rec[m] = "active" /\ loc[m[1]] = "from"
    /\ rec' = [rec EXCEPT ![m] = "done"] /\ loc' = [loc EXCEPT ![m[1]] = "to"]
    /\ made' = [made EXCEPT ![m] = @ + 1]
    /\ UNCHANGED <<camp, driver, item, mind, hands>>

Back(m) == rec[m] = "active" /\ rec' = [rec EXCEPT ![m] = "back"] /\ UNCHANGED <<camp, driver, item, loc, made, mind, hands>>

(* Any driver that finds the move over gives the item its result: the record does not change any more. *)
Result(d, i) ==
    /\ item[i].st = "RUNNING" /\ rec[Of(i)] \in Over
    /\ item' = [item EXCEPT ![i].st = IF rec[Of(i)] = "done" THEN "MOVED" ELSE "FAILED"]
    /\ UNCHANGED <<camp, driver, rec, loc, made, mind, hands>>

Finish(d) ==
    /\ driver = d
    /\ (Running = {} \/ "endsWhileRunning" \in Weak)
    /\ \/ camp = "RUNNING" /\ (\A i \in Items : item[i].st # "PENDING" \/ item[i].att = MaxAttempts) /\ camp' = "DONE" /\ item' = item
       \/ camp = "ABORTING" /\ camp' = "ABORTED"
          /\ item' = [i \in Items |-> IF item[i].st = "PENDING" THEN [item[i] EXCEPT !.st = "SKIPPED"] ELSE item[i]]
    /\ driver' = Nobody
    /\ UNCHANGED <<rec, loc, made, mind, hands>>

Next ==
    \/ Run \/ Pause \/ Resume \/ Abort \/ Retry
    \/ \E i \in Items : Hand(i)
    \/ \E m \in Moves : Commit(m) \/ Back(m)
    \/ \E d \in Drivers : Take(d) \/ Crash(d) \/ Fit(d) \/ Record(d) \/ Unfit(d) \/ Finish(d)
    \/ \E d \in Drivers, i \in Items : Begin(d, i) \/ Look(d, i) \/ Result(d, i)

Spec == Init /\ [][Next]_vars

Symmetry == Permutations(Drivers) \cup Permutations(Items)

-----------------------------------------------------------------------------
(* An attempt moves its tenant at most once. *)
Once == \A m \in Moves : made[m] <= 1

(* An item says MOVED exactly if its move committed; a result without a committed *)
(* move is not taken back by one later.                                          *)
Truth == \A i \in Items :
    /\ item[i].st = "MOVED" => rec[Of(i)] = "done"
    /\ item[i].st \in {"FAILED", "SKIPPED", "PENDING"} /\ item[i].att > 0 => rec[Of(i)] \in {"none", "back"}

(* Nothing of a campaign runs once it is over. *)
Rest == camp \in {"DONE", "ABORTED"} => \A m \in Moves : rec[m] # "active"

(* At most one attempt of an item runs. *)
OneAttempt == \A i \in Items : Cardinality({a \in Attempts : rec[<<i, a>>] = "active"}) <= 1
=============================================================================
