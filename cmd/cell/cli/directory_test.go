// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/sqlite"
)

// withDirectory gives a script whose name begins with "directory_" a directory of its
// own, with no processes of cells: moves have nothing to bring, versions are given by
// nobody.
func withDirectory(env *testscript.Env) error {
	if !strings.HasPrefix(filepath.Base(env.WorkDir), "script-directory_") {
		return nil
	}
	store, err := sqlite.Open(context.Background(), filepath.Join(env.WorkDir, ".directory.db"))
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	credential, hash := directory.NewOperatorCredential()
	table := cells.NewMemTable()
	srv, err := directory.New(directory.Config{Store: store, Table: table, OperatorListener: l, OperatorSHA256: []string{hash}, Stateless: true})
	if err != nil {
		return err
	}
	if err := srv.Start(context.Background()); err != nil {
		return err
	}
	env.Defer(func() {
		_ = srv.Close()
		_ = table.Close()
		_ = store.Close()
	})
	file := filepath.Join(env.WorkDir, ".credential")
	env.Setenv("CELL_OPERATOR_URL", "http://"+l.Addr().String())
	env.Setenv("CELL_OPERATOR_CREDENTIAL_FILE", file)
	return os.WriteFile(file, []byte(credential+"\n"), 0o600)
}

// idOf sets a variable to the id of a record, or of the first one of a list: id VARIABLE
// FILE.
func idOf(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: id VARIABLE FILE")
	}
	type record struct {
		ID string `json:"id"`
	}
	text := []byte(ts.ReadFile(args[1]))
	var one record
	if err := json.Unmarshal(text, &one); err != nil {
		var list []record
		ts.Check(json.Unmarshal(text, &list))
		if len(list) > 0 {
			one = list[0]
		}
	}
	if one.ID == "" {
		ts.Fatalf("%s has no id:\n%s", args[1], text)
	}
	ts.Setenv(args[0], one.ID)
}
