// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"

	"github.com/go-viper/mapstructure/v2"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"

	"github.com/cloister-dev/cloister/cells"
)

// Store engines that a dev fleet can give its cells.
const (
	StoreSQLite   = "sqlite"
	StorePostgres = "postgres"
)

// Config describes a fleet on one machine. The YAML keys are the field tags.
type Config struct {
	// Name goes into every certificate; [a-z0-9-]{1,32}. Default "dev".
	Name string `koanf:"name"`
	// Listen is the edge's public address. Default 127.0.0.1:8080; port 0 picks one.
	Listen string `koanf:"listen"`
	// Store is "sqlite" (default) or "postgres": what each cell keeps its tenants in.
	Store string `koanf:"store"`
	// DefaultCell serves tenants that have no route; "" answers UNKNOWN_TENANT.
	DefaultCell string `koanf:"default_cell"`
	// Extractors find the tenant of a request, first match wins. Each entry has
	// exactly one key: header, host, path, jwt or fixed. See package edge/extract.
	Extractors []map[string]any `koanf:"extractors"`
	// MaxBody is the most bytes of a request's body that the edge takes: more answers
	// TOO_LARGE, and nothing of it reaches a cell if its length is said. 0 is no bound,
	// except for the memory service, which takes 16 MiB itself; -1 is no bound at all.
	MaxBody int64 `koanf:"max_body"`
	// Service is what every cell runs unless the cell says otherwise.
	Service Service `koanf:"service"`
	// Cells are the cells to start with.
	Cells []Cell `koanf:"cells"`
}

// Service says how the service's processes are started. In Command and Env these
// words are replaced: {listen} the address to serve on, {store} the engine, {dsn} its
// connection string or file (with the password in Env only; PGPASSFILE is set), {cell}, {version}, {state} the cell's own folder.
type Service struct {
	Command []string          `koanf:"command"`
	Env     map[string]string `koanf:"env"`
}

// Cell is one cell of a dev fleet.
type Cell struct {
	Name         string  `koanf:"name"`
	Version      string  `koanf:"version"`
	Jurisdiction string  `koanf:"jurisdiction"`
	Geography    string  `koanf:"geography"`
	Host         string  `koanf:"host"`
	Replicas     int     `koanf:"replicas"`
	Service      Service `koanf:"service"`
}

// Load reads a fleet.yaml. Unknown keys are refused by name.
func Load(path string) (Config, error) {
	k := koanf.New(".")
	if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
		return Config{}, fmt.Errorf("read %s: %w", path, err)
	}
	var c Config
	err := k.UnmarshalWithConf("", &c, koanf.UnmarshalConf{DecoderConfig: &mapstructure.DecoderConfig{
		ErrorUnused: true, Result: &c, TagName: "koanf", WeaklyTypedInput: true,
	}})
	if err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// Complete fills in the defaults and checks the rest. The error names the key
// and what it may be.
func (c *Config) Complete() error {
	if c.Name == "" {
		c.Name = "dev"
	}
	if c.Listen == "" {
		c.Listen = "127.0.0.1:8080"
	}
	if c.Store == "" {
		c.Store = StoreSQLite
	}
	if len(c.Extractors) == 0 {
		c.Extractors = []map[string]any{{"header": "X-Tenant"}, {"path": "/t/{tenant}/", "strip": true}}
	}
	if c.MaxBody < -1 {
		return fmt.Errorf("max_body: %d; want a number of bytes, or -1 for no bound", c.MaxBody)
	}
	if len(c.Service.Command) == 0 {
		if c.MaxBody == 0 {
			c.MaxBody = 16 << 20
		}
		c.Service.Command = []string{siblingProgram("memory"), "--listen", "{listen}", "--store", "{store}", "--dsn", "{dsn}"}
	}
	if len(c.Cells) == 0 {
		c.Cells = []Cell{{Name: "cell-a"}, {Name: "cell-b"}}
	}
	if err := cells.CellID(c.Name).Validate(); err != nil {
		return fmt.Errorf("name: %w", err)
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		return fmt.Errorf("listen: %w; want host:port", err)
	}
	if c.Store != StoreSQLite && c.Store != StorePostgres {
		return fmt.Errorf("store: %q; want %s or %s", c.Store, StoreSQLite, StorePostgres)
	}
	seen := map[string]bool{}
	c.Cells = slices.Clone(c.Cells) // the caller's stay as they are
	for i := range c.Cells {
		cell := &c.Cells[i]
		if err := cells.CellID(cell.Name).Validate(); err != nil {
			return fmt.Errorf("cells[%d].name: %w", i, err)
		}
		if seen[cell.Name] {
			return fmt.Errorf("cells[%d].name: %s is there twice", i, cell.Name)
		}
		seen[cell.Name] = true
		if cell.Replicas == 0 {
			cell.Replicas = 1
		}
		if cell.Replicas < 0 || cell.Replicas > 16 {
			return fmt.Errorf("cells[%d].replicas: %d; want 1 to 16", i, cell.Replicas)
		}
		if cell.Version == "" {
			cell.Version = "v1"
		}
		if len(cell.Service.Command) == 0 {
			cell.Service.Command = c.Service.Command
		}
		env := map[string]string{}
		for k, v := range c.Service.Env {
			env[k] = v
		}
		for k, v := range cell.Service.Env {
			env[k] = v
		}
		cell.Service.Env = env
	}
	if c.DefaultCell != "" && !seen[c.DefaultCell] {
		return fmt.Errorf("default_cell: %s is not among the cells", c.DefaultCell)
	}
	return nil
}

// siblingProgram prefers the program beside the running one to the one in PATH:
// a checkout's bin folder works without installing.
func siblingProgram(name string) string {
	if self, err := os.Executable(); err == nil {
		p := filepath.Join(filepath.Dir(self), name)
		if st, err := os.Stat(p); err == nil && st.Mode()&0o111 != 0 {
			return p
		}
	}
	return name
}

// Adopt takes the engine that the cells of a state folder keep their tenants in, unless
// the folder is new or Store names one already. A different one is refused: it
// would start empty cells beside the full ones. Call it before Complete.
func (c *Config) Adopt(dir string) error {
	l := Layout{dir}
	b, err := os.ReadFile(l.engine())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case c.Store == "" || c.Store == string(b):
		c.Store = string(b)
		return nil
	}
	return fmt.Errorf("store: the cells in %s keep their tenants in %s, not in %s; start with --store %s, or in another folder (--fleet)", l.Dir, b, c.Store, b)
}
