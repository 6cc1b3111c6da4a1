// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/internal/files"
)

// eachRecord is what cell each keeps: the command and how it ended in each cell.
type eachRecord struct {
	Command []string                    `json:"command"`
	Cells   map[cells.CellID]eachResult `json:"cells"`
}

type eachResult struct {
	OK bool `json:"ok"`
	// Exit is the command's exit code, -1 when it did not start or was ended by a signal.
	Exit  int       `json:"exit"`
	Error string    `json:"error,omitempty"`
	At    time.Time `json:"at"`
}

func (a *app) eachCmd() *cobra.Command {
	var router, dir, record string
	var again bool
	var who eachBot
	c := &cobra.Command{
		Use:   "each --cells DIR --record FILE -- COMMAND [ARG...]",
		Short: "Run a command of no tenant in every cell, and again in those where it failed",
		Long: `Run a command once for each cell that the router's directory names, one after the other,
with the cell's settings (DIR/<cell>.env) in its environment and without this command's
own operator credential. How it ended in each cell is kept in FILE; it fails until the
command has succeeded in all, and when it is run again only the cells where it has not
are tried. FILE of another command is refused, unless --again begins anew.

With --bot the command gets a token of the cell in CELL_BOT_TOKEN, good for five minutes:
the bot proves itself to each cell with its key there, which has to be the one that the
directory knows by its thumbprint. Each use of the token is in the cell's audit.`,
		Args: cobra.MinimumNArgs(1),
	}
	f := c.Flags()
	routerFlag(c, &router)
	f.StringVar(&dir, "cells", "", "folder with the settings of every cell, <cell>.env each")
	f.StringVar(&record, "record", "", "file that keeps how it ended in each cell")
	f.BoolVar(&again, "again", false, "run it in every cell, whatever the file says")
	who.add(c)
	_ = c.MarkFlagRequired("cells")
	_ = c.MarkFlagRequired("record")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if err := who.check(); err != nil {
			return err
		}
		return a.each(cmd.Context(), router, dir, record, again, &who, args)
	}
	return c
}

func (a *app) each(ctx context.Context, router, dir, record string, again bool, who *eachBot, args []string) error {
	list, err := cellFiles(dir)
	if err != nil {
		return err
	}
	op, err := a.routerOperator(router)
	if err != nil {
		return err
	}
	defer op.CloseIdleConnections()
	v, err := op.Directory(ctx)
	if err != nil {
		return err
	}
	envs := map[cells.CellID][]string{}
	for i := range v.Cells {
		name := v.Cells[i].Name
		at := slices.IndexFunc(list, func(f cellFile) bool { return f.cell == name })
		if at < 0 {
			return usagef("--cells: %s has no settings of cell %s (%s.env)", dir, name, name)
		}
		if envs[name], err = envFile(list[at].path); err != nil {
			return &usageError{err}
		}
		if !slices.ContainsFunc(envs[name], func(l string) bool { return l == "CELL="+string(name) }) {
			return usagef("--cells: %s does not say CELL=%s", list[at].path, name)
		}
	}
	rec, err := readEach(record, args, again)
	if err != nil {
		return err
	}
	var failed []string
	for i := range v.Cells {
		name := v.Cells[i].Name
		if rec.Cells[name].OK {
			continue
		}
		a.log.Info("running", "cell", name)
		res := a.proveAndRun(ctx, who, &v.Cells[i], envs[name], args)
		rec.Cells[name] = res
		b, err := json.MarshalIndent(rec, "", "  ")
		if err != nil {
			return err
		}
		if err := files.Write(record, append(b, '\n'), 0o600); err != nil {
			return fmt.Errorf("the record of cell %s, where it ended with %d: %w", name, res.Exit, err)
		}
		if !res.OK {
			failed = append(failed, string(name))
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	if err := a.print(rec, func(w io.Writer) error {
		lines := [][]string{{"CELL", "OK", "EXIT", "AT", "ERROR"}}
		for i := range v.Cells {
			r := rec.Cells[v.Cells[i].Name]
			lines = append(lines, []string{string(v.Cells[i].Name), fmt.Sprint(r.OK), fmt.Sprint(r.Exit), r.At.Format(time.RFC3339), dash(r.Error)})
		}
		return table(w, lines)
	}); err != nil {
		return err
	}
	if failed != nil {
		return fmt.Errorf("it failed in %s; run cell each again, it resumes there", strings.Join(failed, ", "))
	}
	return nil
}

func readEach(path string, args []string, again bool) (rec eachRecord, err error) {
	fresh := eachRecord{Command: args, Cells: map[cells.CellID]eachResult{}}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && again {
		return fresh, nil
	}
	if err != nil {
		return rec, err
	}
	if err := json.Unmarshal(b, &rec); err != nil {
		return rec, usagef("--record: %s is no record: %w", path, err)
	}
	if !slices.Equal(rec.Command, args) {
		return rec, usagef("--record: %s is of another command; take another file, or --again", path)
	}
	if rec.Cells == nil {
		rec.Cells = fresh.Cells
	}
	return rec, nil
}

// proveAndRun gets the token of a bot, where one is wanted, and runs the command.
func (a *app) proveAndRun(ctx context.Context, who *eachBot, c *deploy.Cell, env, args []string) eachResult {
	if who.name == "" {
		return a.runEach(ctx, env, args)
	}
	token, err := who.token(ctx, c, env)
	if err != nil {
		return eachResult{Exit: -1, Error: err.Error(), At: time.Now().UTC().Truncate(time.Second)}
	}
	return a.runEach(ctx, append(env[:len(env):len(env)], "CELL_BOT_TOKEN="+token), args)
}

// runEach runs the command in one cell. What it prints goes to standard error, when
// JSON was asked for: the result is the document.
func (a *app) runEach(ctx context.Context, env, args []string) eachResult {
	x := exec.CommandContext(ctx, args[0], args[1:]...)
	for _, l := range os.Environ() {
		// The operator credential is for this command, and a setting of another cell for none.
		if name, _, _ := strings.Cut(l, "="); !strings.HasPrefix(name, "CELL_") && name != "CELL" {
			x.Env = append(x.Env, l)
		}
	}
	x.Env = append(x.Env, env...)
	x.Stdout, x.Stderr = a.out, a.err
	if a.json {
		x.Stdout = a.err
	}
	x.WaitDelay = 5 * time.Second
	err := x.Run()
	res := eachResult{OK: err == nil, At: time.Now().UTC().Truncate(time.Second)}
	if err != nil {
		res.Error, res.Exit = err.Error(), -1
		if x.ProcessState != nil {
			res.Exit = x.ProcessState.ExitCode()
		}
	}
	return res
}
