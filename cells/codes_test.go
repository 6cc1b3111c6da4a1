// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

// The table of codes in docs/operations.md is the closed list: every code, with
// its status and whether a retry is safe, and no other.
func TestOperationsListsEveryCode(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "docs", "operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`(?m)^\| ([A-Z_]+) \| (\d+) \| (yes|no) \|`)
	got := map[cells.Code]string{}
	for _, m := range row.FindAllStringSubmatch(string(b), -1) {
		got[cells.Code(m[1])] = m[2] + " " + m[3]
	}
	for _, c := range cells.Codes() {
		want := fmt.Sprint(c.HTTPStatus(), map[bool]string{true: " yes", false: " no"}[c.Retry()])
		if got[c] != want {
			t.Errorf("docs/operations.md says %q of %s, want %q", got[c], c, want)
		}
		delete(got, c)
	}
	for c := range got {
		t.Errorf("docs/operations.md lists %s, which is no code", c)
	}
}
