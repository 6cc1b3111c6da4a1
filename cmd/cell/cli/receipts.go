// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/receipt"
)

// sawText is what clients saw of a move, for a line of text.
func sawText(seen *time.Duration) string {
	switch {
	case seen == nil:
		return ""
	case *seen == 0:
		return ", clients saw no refusal"
	}
	return ", clients were refused for " + short(*seen)
}

// sawShort is for how long clients were refused, for a table.
func sawShort(seen *time.Duration) string {
	switch {
	case seen == nil:
		return "?"
	case *seen == 0:
		return "0"
	}
	return short(*seen)
}

// receiptOf returns the receipt of a move, or nil if there is none.
func receiptOf(ctx context.Context, cl *client.Client, id cells.MoveID) (*receipt.Receipt, error) {
	r, err := cl.Receipt(ctx, id)
	if a := cells.AnswerOf(err); a != nil && a.Code == cells.CodeNotFound {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &r, nil
}

func (a *app) movesShowCmd() *cobra.Command {
	var follow, only bool
	c := &cobra.Command{
		Use: "show MOVE", Short: "Show one move with its steps and its receipt", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeMoves,
		Long: `Show one move: its steps and, once it is over, what its receipt says: how it ended,
what was compared, what it cost, who asked for it, and whether rows were removed.

--receipt prints the signed receipt itself, for cell moves verify --file.`,
		Example: "  cell moves show mv-ABC\n  cell moves show mv-ABC --receipt > receipt.json",
		RunE: a.with(func(ctx context.Context, cl *client.Client, args []string) error {
			id := cells.MoveID(args[0])
			if only {
				r, err := cl.Receipt(ctx, id)
				if err != nil {
					return err
				}
				return writeJSON(a.out, r)
			}
			m, err := cl.MoveByID(ctx, id)
			if err != nil {
				return err
			}
			if follow {
				return a.followMove(ctx, cl, m)
			}
			r, err := receiptOf(ctx, cl, id)
			if err != nil {
				return err
			}
			doc := struct {
				api.Move
				Receipt *receipt.Receipt `json:"receipt,omitempty"`
			}{m, r}
			return a.print(doc, func(w io.Writer) error {
				if err := printMove(w, m); err != nil {
					return err
				}
				rows := [][]string{{"  STEP", "TOOK", "STATE", "EPOCH", "AT"}}
				for _, s := range m.Steps {
					rows = append(rows, []string{"  " + s.Step, short(s.Took), dash(s.State), fmt.Sprint(s.Epoch), s.At.Format("15:04:05.000")})
				}
				if err := table(w, rows); err != nil || r == nil {
					return err
				}
				list, err := r.Statements()
				if err != nil {
					return err
				}
				return printStatements(w, list)
			})
		}),
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "follow it to its end")
	c.Flags().BoolVar(&only, "receipt", false, "print the signed receipt, in JSON")
	return c
}

func (a *app) movesVerifyCmd() *cobra.Command {
	var file, keyFile string
	c := &cobra.Command{
		Use:   "verify [MOVE]",
		Short: "Verify the receipt of a move, from the directory or from a file",
		Long: fmt.Sprintf(`Verify that every statement of a receipt was signed by a key that you trust, about
this move and in this order, and show what it says. A receipt ends with a statement
that says so; the directory writes it once nothing is left to be told (the removal of
rows, reports of edges). The exit code is 0 when the receipt verifies and ends, %d when
it verifies and does not end there, and %d when it does not verify.

With --file alone nothing is asked of the directory: a receipt that does not end was
cut, or taken too early. With --file and a move the directory's own copy says which:
"running" is all that there is, so far; "cut" lacks statements that the directory has.

The default key is that of the fleet's pki folder (cell pki receipt-key).`, ExitOpen, ExitForged),
		Example: "  cell moves verify mv-ABC\n  cell moves verify --file receipt.json --key receipt.pub\n  cell moves verify mv-ABC --file receipt.json",
		Args:    cobra.MaximumNArgs(1),
	}
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if file == "" && len(args) == 0 {
			return usagef("name a move, or a receipt with --file")
		}
		if keyFile == "" {
			keyFile = a.statePath("pki", pki.ReceiptPublicFile)
		}
		keys, err := pki.ReadPublicKeys(keyFile)
		if err != nil {
			return fmt.Errorf("%w; name the public key with --key", err)
		}
		var id cells.MoveID
		if len(args) > 0 {
			id = cells.MoveID(args[0])
		}
		var mine []receipt.Statement
		if file != "" {
			doc, err := readReceipt(a.in, file)
			if err != nil {
				return err
			}
			if mine, err = verified(doc, id, keys); err != nil {
				return err
			}
			if id == "" {
				return a.verdict(mine, verdictOf(mine, "open"))
			}
		}
		return a.with(func(ctx context.Context, cl *client.Client, _ []string) error {
			r, err := cl.Receipt(ctx, id)
			if err != nil {
				return err
			}
			doc, err := json.Marshal(r)
			if err != nil {
				return err
			}
			whole, err := verified(doc, id, keys)
			switch {
			case err != nil:
				return err
			case mine == nil:
				return a.verdict(whole, verdictOf(whole, "running"))
			case !receipt.Begins(mine, whole):
				return fmt.Errorf("%w: the directory has another receipt of move %s", receipt.ErrUnverified, id)
			case len(mine) < len(whole):
				return a.verdict(mine, verdict{State: "cut", Missing: len(whole) - len(mine)})
			}
			return a.verdict(mine, verdictOf(mine, "running"))
		})(cmd, args)
	}
	c.Flags().StringVar(&file, "file", "", "a receipt in JSON; - reads standard input")
	c.Flags().StringVar(&keyFile, "key", "", "public keys that are trusted, in PEM; default: the fleet's own")
	return c
}

func readReceipt(in io.Reader, file string) ([]byte, error) {
	r := in
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		r = f
	}
	doc, err := io.ReadAll(io.LimitReader(r, receipt.MaxSize+1))
	if err != nil {
		return nil, err
	}
	// cell --json moves show prints the receipt inside of the move.
	var shown struct {
		Receipt json.RawMessage `json:"receipt"`
	}
	if json.Unmarshal(doc, &shown) == nil && shown.Receipt != nil {
		return shown.Receipt, nil
	}
	return doc, nil
}

// errOpen: a receipt does not end where it stops.
var errOpen = errors.New("the receipt does not end here")

// verdict is how a receipt that verifies stops: "ended" is whole, "open" was cut or taken
// before its end, "running" is all that the directory has so far, "cut" lacks statements
// that it has.
type verdict struct {
	State string `json:"state"`
	// Missing is how many statements a cut receipt lacks.
	Missing int `json:"missing,omitempty"`
}

// verdictOf is "ended", or what a receipt without an end is.
func verdictOf(list []receipt.Statement, otherwise string) verdict {
	if receipt.Ended(list) {
		otherwise = "ended"
	}
	return verdict{State: otherwise}
}

func (v verdict) err() error {
	switch v.State {
	case "open":
		return fmt.Errorf("%w: it was cut, or taken before its end; name the move as well to ask the directory which", errOpen)
	case "running":
		return fmt.Errorf("%w: the directory has no more of it yet", errOpen)
	case "cut":
		return fmt.Errorf("%w: it was cut, or taken earlier; the directory goes on: it has %d more", errOpen, v.Missing)
	}
	return nil
}

// verified checks a receipt, of the move id if that is known.
func verified(doc []byte, id cells.MoveID, keys []ed25519.PublicKey) ([]receipt.Statement, error) {
	list, err := receipt.Verify(doc, keys)
	if err == nil && id != "" && list[0].Move != id {
		err = fmt.Errorf("%w: it is about move %s", receipt.ErrUnverified, list[0].Move)
	}
	if err != nil && !errors.Is(err, receipt.ErrUnverified) {
		err = fmt.Errorf("%w: %w", receipt.ErrUnverified, err)
	}
	return list, err
}

// verdict prints what a receipt that verifies says; it fails if the receipt is not whole.
func (a *app) verdict(list []receipt.Statement, v verdict) error {
	doc := struct {
		Verified bool           `json:"verified"`
		Ended    bool           `json:"ended"`
		Move     cells.MoveID   `json:"move"`
		Tenant   cells.TenantID `json:"tenant"`
		verdict
		Statements []receipt.Statement `json:"statements"`
	}{true, receipt.Ended(list), list[0].Move, list[0].Tenant, v, list}
	err := a.print(doc, func(w io.Writer) error {
		fmt.Fprintf(w, "%s: verified, %s, %d statements about tenant %s\n", list[0].Move, v.State, len(list), list[0].Tenant)
		return printStatements(w, list)
	})
	if err != nil {
		return err
	}
	return v.err()
}

func printStatements(w io.Writer, list []receipt.Statement) error {
	at := func(t time.Time) string { return t.Format(time.RFC3339) }
	for _, s := range list {
		switch {
		case s.Outcome != nil:
			if err := printOutcome(w, &s); err != nil {
				return err
			}
		case s.Clients != nil:
			fmt.Fprintf(w, "  %s  clients: %s%s\n", at(s.At), seenText(&s.Clients.Seen), budgetText(s.Clients.Budget))
		case s.Removal != nil && s.Removal.Gone:
			fmt.Fprintf(w, "  %s  rows removed from %s (fence closed at %d), verified\n", at(s.At), s.Removal.Cell, s.Removal.Epoch)
		case s.End != nil:
			fmt.Fprintf(w, "  %s  end, after %d statements\n", at(s.At), s.N)
		case s.Removal != nil:
			fmt.Fprintf(w, "  %s  nothing is removed from %s any more: it holds the tenant again\n", at(s.At), s.Removal.Cell)
		}
	}
	return nil
}

func seenText(s *receipt.Seen) string {
	if s == nil {
		return "no edge has reported"
	}
	if s.Refused == 0 {
		return fmt.Sprintf("no request was refused (%d edges)", s.Edges)
	}
	return fmt.Sprintf("%d requests were refused within %s (%d edges)", s.Refused, short(s.Span), s.Edges)
}

func budgetText(b *receipt.Budget) string {
	if b == nil {
		return ""
	}
	ms := func(d time.Duration) string { return d.Round(time.Millisecond).String() }
	return fmt.Sprintf("; charged %s, %s left of %s (%s without this move)", ms(b.Charged), ms(b.After), ms(b.Limit), ms(b.Before))
}

func printOutcome(w io.Writer, s *receipt.Statement) error {
	o := s.Outcome
	forced := ""
	if o.Forced {
		forced = ", FORCED"
	}
	fmt.Fprintf(w, "  %s  %s: %s -> %s by %s%s\n", s.At.Format(time.RFC3339), o.Verdict, o.Source, o.Target, o.Actor, forced)
	if o.Reason != "" {
		fmt.Fprintf(w, "    reason   %s\n", o.Reason)
	}
	fmt.Fprintf(w, "    epochs   %d, closed at %d, opened at %d\n", o.Base, o.Closed, o.Opened)
	if o.DataMark != "" || o.EventMark > 0 {
		fmt.Fprintf(w, "    marks    event %d, data %s\n", o.EventMark, dash(o.DataMark))
	}
	fmt.Fprintf(w, "    pause    %s by the driver, %s predicted, at most %s allowed\n", short(o.Pause), short(o.Predicted), short(o.Bound))
	fmt.Fprintf(w, "    clients  %s%s\n", seenText(o.Clients), budgetText(o.Budget))
	if o.ComparedUnknown {
		fmt.Fprintln(w, "    what was compared is not known: the driver died right behind the decision")
	}
	if len(o.Tables) == 0 {
		return nil
	}
	rows := [][]string{{"    TABLE", "COMPARED", "ROWS", "DIGEST (source = target)", "AT"}}
	for _, t := range o.Tables {
		what := "all rows"
		if !t.Whole {
			what = fmt.Sprintf("%d changed keys", t.Keys)
		}
		sum := t.Source.Sum
		if t.Source != t.Target {
			sum = fmt.Sprintf("DIFFERENT: %s and %s", t.Source.Sum, t.Target.Sum)
		}
		rows = append(rows, []string{"    " + t.Table, what, fmt.Sprint(t.Source.Rows), sum, t.Position})
	}
	return table(w, rows)
}

func (a *app) pkiReceiptKey(folder func() string) *cobra.Command {
	return &cobra.Command{
		Use:   "receipt-key",
		Short: "Show the public key of the fleet's receipts; make the key the first time",
		Long: `The directory signs the receipts of moves with the private key (directory serve
--receipt-key); whoever verifies them needs the public one (moves verify --key). To
replace the key, move the private one away, run this, and put the old public key
into the file of the new one: a file may hold several.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			key, public, err := pki.EnsureReceiptKey(folder())
			if err != nil {
				return err
			}
			block, err := os.ReadFile(public)
			if err != nil {
				return err
			}
			return a.print(map[string]string{"key": key, "public": public, "pem": string(block)}, func(w io.Writer) error {
				_, err := w.Write(block)
				return err
			})
		},
	}
}
