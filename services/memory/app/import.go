// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"

	"github.com/cloister-dev/cloister/cells"
	checks "github.com/cloister-dev/cloister/member/tenancy"
	"github.com/cloister-dev/cloister/services/memory"
)

// importBatch is how many items are written in one transaction.
const importBatch = 200

// Commands lists the command lines that connect to the stores, with what they
// declare to the tenancy check; tenant is what import was given.
func Commands(tenant cells.TenantID) []checks.Command {
	return []checks.Command{
		{Name: "memory", Free: "it serves requests, each of which is checked"},
		{Name: "memory import", Tenants: []cells.TenantID{tenant}},
	}
}

// importMain writes one tenant's items from in, a JSON object a line as memory.set
// takes it. The exit code is as Main's.
func importMain(ctx context.Context, args []string, in io.Reader, stderr io.Writer) int {
	o := options{store: "postgres", command: true}
	var tenant string
	fs := flag.NewFlagSet("memory import", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&tenant, "tenant", "", "the tenant that the items are for")
	fs.StringVar(&o.dsn, "dsn", "", "the Postgres URL")
	fs.StringVar(&o.issuers, "issuers", "", "the issuers file of the cell's processes, where CELL is set")
	fs.Usage = func() {
		fmt.Fprint(stderr, "usage: memory import --tenant T --dsn URL < items.ndjson\n\nWrite items for one tenant, a JSON object a line as memory.set takes it, 200 in a\ntransaction. In a cell the tenant must be one that the cell holds.\n\n")
		fs.PrintDefaults()
	}
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	t := cells.TenantID(tenant)
	if err := t.Validate(); err != nil || fs.NArg() > 0 || o.dsn == "" {
		fmt.Fprintln(stderr, "memory import: --tenant and --dsn are required, and there are no arguments; see --help")
		return 2
	}
	n, err := o.importItems(ctx, t, in, slog.New(slog.NewTextHandler(stderr, nil)))
	if err != nil {
		fmt.Fprintf(stderr, "memory import: after %d items: %v\n", n, err)
		return 1
	}
	fmt.Fprintf(stderr, "memory import: %d items\n", n)
	return 0
}

func (o *options) importItems(ctx context.Context, t cells.TenantID, in io.Reader, log *slog.Logger) (n int, err error) {
	s, is, err := o.boot(log)
	if err != nil {
		return 0, err
	}
	defer is.close()
	dep, err := o.openDeployment(ctx, log)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, dep.close()) }()
	d, err := o.openCell(ctx, s, is, dep, log)
	if err != nil {
		return 0, err
	}
	defer d.close()
	// Before the service's own store is opened: nothing is written for a tenant that is
	// not declared.
	cmd := Commands(t)[1]
	cmd.RouterToken = s.RouterToken != ""
	if err := checks.CheckCommand(ctx, d.config, cmd); err != nil {
		return 0, err
	}
	store, err := memory.OpenPostgres(ctx, o.dsn, memory.OpenOptions{Checked: s.Cell != ""})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	dec := json.NewDecoder(in)
	dec.DisallowUnknownFields()
	for {
		var batch []memory.Write
		for len(batch) < importBatch {
			var w memory.Write
			err := dec.Decode(&w)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return n, fmt.Errorf("item %d: %w", n+len(batch)+1, err)
			}
			batch = append(batch, w)
		}
		if len(batch) == 0 {
			return n, nil
		}
		if _, err := store.Write(ctx, t, "memory.bulk_set", batch); err != nil {
			return n, err
		}
		n += len(batch)
	}
}
