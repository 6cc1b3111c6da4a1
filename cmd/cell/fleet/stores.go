// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// Stores are the addresses of the databases of the cells in the state folder, sqlite:PATH
// or postgres://…, with the password: for the user who may read the folder. A cell whose
// database is elsewhere, or whose Postgres was never started, is left out.
func (l Layout) Stores() (map[cells.CellID]string, error) {
	out := map[cells.CellID]string{}
	list, err := os.ReadDir(filepath.Dir(l.Cell("x")))
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		name := e.Name()
		file, err := filepath.Abs(filepath.Join(l.Cell(name), "store.db"))
		if err != nil {
			return nil, err
		}
		if _, err := os.Stat(file); err == nil {
			out[cells.CellID(name)] = "sqlite:" + file
			continue
		}
		// The fourth line of the server's file is its port.
		pid, err := os.ReadFile(filepath.Join(l.Postgres(name), "data", "postmaster.pid"))
		lines := strings.Split(string(pid), "\n")
		pass, perr := os.ReadFile(l.PassFile(name))
		fields := strings.Split(strings.TrimSpace(string(pass)), ":")
		if err != nil || perr != nil || len(lines) < 4 || len(fields) != 5 {
			continue
		}
		u := url.URL{Scheme: "postgres", User: url.UserPassword(fields[3], fields[4]), Host: "127.0.0.1:" + strings.TrimSpace(lines[3]), Path: "cell", RawQuery: "sslmode=disable"}
		out[cells.CellID(name)] = u.String()
	}
	return out, nil
}
