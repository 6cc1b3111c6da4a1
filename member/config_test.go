// SPDX-License-Identifier: Apache-2.0

package member

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

func complete() map[string]string {
	return map[string]string{
		"CELL_ID": "a", "CELL_FLEET": "prod", "CELL_DIRECTORY_URL": "https://directory:7443/",
		"CELL_CHANNEL_CA": "/x/ca.crt", "CELL_CHANNEL_CERT": "/x/a.crt", "CELL_CHANNEL_KEY": "/x/a.key",
		"CELL_SERVICE_URL": "http://10.0.0.7:8080",
	}
}

func from(env map[string]string) (Config, bool, error) {
	return fromEnv(func(k string) (string, bool) { v, ok := env[k]; return v, ok })
}

func TestFromEnv(t *testing.T) {
	cfg, on, err := from(complete())
	if err != nil || !on {
		t.Fatalf("%v %v", on, err)
	}
	if cfg.Cell != "a" || cfg.DirectoryURL != "https://directory:7443" || cfg.AgentAddr != "127.0.0.1:0" || cfg.Version != "dev" || !strings.HasPrefix(cfg.Instance, "a-") {
		t.Fatalf("%+v", cfg)
	}
	again, _, _ := from(complete())
	if again.Instance == cfg.Instance {
		t.Fatal("two starts have one instance name")
	}
	env := complete()
	maps.Copy(env, map[string]string{
		"CELL_INSTANCE": "pod-7", "CELL_VERSION": "v2", "CELL_AGENT_ADDR": "0.0.0.0:7000", "CELL_AGENT_URL": "https://pod-7:7000",
		"CELL_ADMISSION_KEY_FILE": "/x/key", "CELL_STATE_DIR": "/x/state", "CELL_DEFAULT_CELL": "first", "CELL_CHANNEL_REVOKED": "/x/revoked.txt",
	})
	cfg, on, err = from(env)
	want := Config{
		Cell: "a", Fleet: "prod", Instance: "pod-7", Version: "v2", DirectoryURL: "https://directory:7443", ChannelCA: "/x/ca.crt",
		ChannelCert: "/x/a.crt", ChannelKey: "/x/a.key", ChannelRevoked: "/x/revoked.txt", AgentAddr: "0.0.0.0:7000", AgentURL: "https://pod-7:7000",
		ServiceURL: "http://10.0.0.7:8080", AdmissionKeyFile: "/x/key", StateDir: "/x/state", DefaultCell: "first",
	}
	if err != nil || !on || cfg != want {
		t.Fatalf("%+v\n%+v\n%v", cfg, want, err)
	}
}

func TestFromEnvOff(t *testing.T) {
	for _, env := range []map[string]string{
		{}, {"CELL_ID": ""}, {"CELL_FLEET": ".cell"}, {"CELL_DIRECTORY_URL": "https://x"}, {"CELL_VERSION": "v1"},
	} {
		if cfg, on, err := from(env); on || err != nil || cfg != (Config{}) {
			t.Errorf("%v: %+v %v %v", env, cfg, on, err)
		}
	}
	for k, v := range complete() {
		if k == "CELL_ID" || k == "CELL_FLEET" || k == "CELL_DIRECTORY_URL" {
			continue
		}
		if _, on, err := from(map[string]string{k: v}); on || !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), k) || !strings.Contains(err.Error(), "CELL_ID") {
			t.Errorf("only %s: %v %v", k, on, err)
		}
	}
}

func TestFromEnvNamesWhatIsWrong(t *testing.T) {
	for k := range complete() {
		if k == "CELL_ID" {
			continue
		}
		env := complete()
		delete(env, k)
		if _, on, err := from(env); !on || !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), k) {
			t.Errorf("without %s: %v %v", k, on, err)
		}
	}
	for k, values := range map[string][]string{
		"CELL_ID":            {"A", "a/b", strings.Repeat("a", 33)},
		"CELL_FLEET":         {"Prod", "a b"},
		"CELL_INSTANCE":      {"a b", strings.Repeat("x", 65)},
		"CELL_VERSION":       {strings.Repeat("x", 129)},
		"CELL_DIRECTORY_URL": {"http://x", "x", "https://", "https://u:p@x", "https://x/path", "https://x?q=1", "https://x#f", "://"},
		"CELL_SERVICE_URL":   {"ftp://x", "10.0.0.1:80", "http://x/path"},
		"CELL_AGENT_ADDR":    {"x", "127.0.0.1", ":7000", "0.0.0.0:7000", "[::]:7000"},
		"CELL_AGENT_URL":     {"http://x", "https://x/y"},
		"CELL_DEFAULT_CELL":  {"Nope"},
	} {
		for _, v := range values {
			env := complete()
			env[k] = v
			if _, on, err := from(env); !on || !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), strings.TrimSuffix(k, "ADDR")) {
				t.Errorf("%s=%q: %v %v", k, v, on, err)
			}
		}
	}
}

func TestReadKeys(t *testing.T) {
	path := filepath.Join(t.TempDir(), "k")
	try := func(text string) ([][]byte, error) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return readKeys(path)
	}
	k32 := strings.Repeat("ab", 32)
	if k, err := try("# new\n" + k32 + "\n\n  " + strings.Repeat("cd", 16) + "\n"); err != nil || len(k) != 2 || len(k[0]) != 32 || len(k[1]) != 16 {
		t.Fatalf("%v %v", k, err)
	}
	for _, text := range []string{"", "\n# only a comment\n", "short", strings.Repeat("ab", 15), k32 + "\nxyz\n", k32[:31]} {
		if _, err := try(text); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := readKeys(path + ".none"); !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
}

func TestStateKey(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	a, err := stateKey(dir)
	if err != nil || len(a) != 32 {
		t.Fatalf("%v %v", a, err)
	}
	b, err := stateKey(dir)
	if err != nil || string(a) != string(b) {
		t.Fatalf("another key: %v", err)
	}
	fi, err := os.Stat(filepath.Join(dir, "routes.key"))
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", fi, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "routes.key"), a[:7], 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := stateKey(dir); err != nil || len(c) != 32 || string(c) == string(a) {
		t.Fatalf("after a torn write: %v %v", c, err)
	}
}
