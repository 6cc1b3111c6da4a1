// SPDX-License-Identifier: Apache-2.0

package pgcluster

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// hba asks everybody for the password: any user of the machine reaches the port.
const hba = `local all all scram-sha-256
host all all 127.0.0.1/32 scram-sha-256
local replication all scram-sha-256
host replication all 127.0.0.1/32 scram-sha-256
`

// initialise makes the data and the superuser's password, as far as they are not
// there, and reads the password.
func (c *Cluster) initialise(ctx context.Context) error {
	data, secret := filepath.Join(c.opts.Dir, "data"), filepath.Join(c.opts.Dir, "password")
	b, err := os.ReadFile(secret)
	if err == nil {
		c.password = strings.TrimSpace(string(b))
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	c.password = rand.Text()
	fresh := secret + ".new"
	if err := c.write(fresh, c.password+"\n"); err != nil {
		return err
	}
	_, err = os.Stat(filepath.Join(data, "PG_VERSION"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		cmd := c.command(ctx, "initdb", "-D", data, "-U", "postgres", "--auth=scram-sha-256", "--pwfile="+fresh,
			"--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("initdb: %w: %s", err, bytes.TrimSpace(out))
		}
	case err != nil:
		return err
	default:
		// Made when there was no password: the server sets one without being reachable.
		cmd := c.command(ctx, "postgres", "--single", "-D", data, "postgres")
		cmd.Stdin = strings.NewReader("ALTER USER postgres PASSWORD '" + c.password + "'\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("setting the password: %w: %s", err, bytes.TrimSpace(out))
		}
	}
	if err := c.write(filepath.Join(data, "pg_hba.conf"), hba); err != nil {
		return err
	}
	return os.Rename(fresh, secret)
}

// write makes a file that only the server's user can read.
func (c *Cluster) write(path, content string) error {
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		return err
	}
	if err := os.Chmod(path, 0o600); err != nil || c.cred == nil {
		return err
	}
	return os.Chown(path, int(c.cred.Uid), int(c.cred.Gid))
}
