// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"os"
	"testing"
)

// A folder whose cells use one engine is not started with the other: empty cells
// would stand beside the full ones.
func TestAdoptTheEngineOfTheFolder(t *testing.T) {
	dir := t.TempDir()
	var c Config
	if err := c.Adopt(dir); err != nil || c.Store != "" {
		t.Errorf("new folder: %q, %v", c.Store, err)
	}
	if err := os.WriteFile(Layout{dir}.engine(), []byte(StorePostgres), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.Adopt(dir); err != nil || c.Store != StorePostgres {
		t.Errorf("nothing chosen: %q, %v", c.Store, err)
	}
	c.Store = StoreSQLite
	if err := c.Adopt(dir); err == nil {
		t.Error("another engine is taken")
	}
}
