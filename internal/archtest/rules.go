// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// module is the path of the repository's main module.
const module = "github.com/cloister-dev/cloister"

// roles are the folders of the house, top first. A package may import packages of
// its own role and of those below it.
var roles = []string{
	"cmd", "services", "edge", "directory", "border", "member", "resilience", "channel", "transfer", "guard", "table", "cells",
}

// free are folders that any role may import, and that import none.
const free = "internal"

// cellsModules are all that package cells may depend on beside the standard
// library and itself: whoever imports it gets a gRPC server's modules, and no
// database, no broker and no client of a cluster.
var cellsModules = []string{
	"github.com/cenkalti/backoff/v5",
	"golang.org/x/net", "golang.org/x/sys", "golang.org/x/text",
	"google.golang.org/genproto/googleapis/rpc", "google.golang.org/grpc", "google.golang.org/protobuf",
}

// heavyPackages are parts of the standard library that cells stays free of.
var heavyPackages = []string{"database/sql", "plugin", "testing"}

// heavyWords name what nothing below cells may be called, whatever cellsModules
// comes to hold.
var heavyWords = []string{"sql", "pgx", "postgres", "gorm", "etcd", "k8s.io", "kube", "clickhouse", "kafka", "franz", "nats", "redis", "mongo"}

// roleOf returns a package's role, by its path below the module: "" for the
// module's own root.
func roleOf(path string) string {
	rest, ok := strings.CutPrefix(path, module+"/")
	if !ok {
		return ""
	}
	role, _, _ := strings.Cut(rest, "/")
	return role
}

func isOurs(path string) bool { return path == module || strings.HasPrefix(path, module+"/") }

// isTestSupport reports whether a package exists for tests only: a conformance
// suite (tabletest) or what tests run on.
func isTestSupport(path string) bool {
	last := path[strings.LastIndexByte(path, '/')+1:]
	return strings.HasSuffix(last, "test")
}

// isCellsInternal reports whether a package is one of those that hold what cells
// works with and that know nothing of it: memory layouts, parsers.
func isCellsInternal(path string) bool { return strings.HasPrefix(path, module+"/cells/internal/") }

// checkImport says what is wrong with an import of one of our packages by another.
// inTest is set when only test files have it.
func checkImport(from, to string, inTest bool) error {
	if !isOurs(to) || from == to {
		return nil
	}
	if isTestSupport(to) && !inTest && !isTestSupport(from) {
		return fmt.Errorf("%s imports %s, which is for tests", from, to)
	}
	if inTest && isTestSupport(to) {
		return nil // a suite is made to be run from anywhere
	}
	upper, lower := roleOf(from), roleOf(to)
	switch {
	case lower == free:
		return nil
	case upper == free:
		return fmt.Errorf("%s imports %s: what is internal serves every role and knows none", from, to)
	}
	i, j := slices.Index(roles, upper), slices.Index(roles, lower)
	switch {
	case i < 0:
		return fmt.Errorf("%s is in no role of the house", from)
	case j < 0:
		return fmt.Errorf("%s imports %s, which is in no role of the house", from, to)
	case isCellsInternal(from) && !inTest:
		return fmt.Errorf("%s imports %s: what is inside cells serves it and knows nothing of it", from, to)
	case upper == "cells" && lower == "cells" && !isCellsInternal(to) && !inTest:
		return fmt.Errorf("%s imports %s: cells is one package", from, to)
	case j < i:
		return fmt.Errorf("%s imports %s: imports point down, from %s to %s they point up", from, to, upper, lower)
	}
	return nil
}

// checkCellsDep says whether package cells may depend on a package of a module;
// the module is "" for the standard library.
func checkCellsDep(pkg, mod string) error {
	switch {
	case mod == "":
		if slices.Contains(heavyPackages, pkg) {
			return fmt.Errorf("cells depends on %s", pkg)
		}
		return nil
	case mod == module:
		if pkg != module+"/cells" && !isCellsInternal(pkg) {
			return fmt.Errorf("cells depends on %s", pkg)
		}
		return nil
	case !slices.Contains(cellsModules, mod):
		return fmt.Errorf("cells depends on %s of module %s, which is not on its list", pkg, mod)
	}
	for _, w := range heavyWords {
		if strings.Contains(pkg, w) {
			return fmt.Errorf("cells depends on %s", pkg)
		}
	}
	return nil
}

const (
	licence  = "// SPDX-License-Identifier: Apache-2.0"
	maxLines = 600
)

var (
	generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)
	// sleeping finds a call; its own pattern is none.
	sleeping = regexp.MustCompile(`\btime\.Sleep\(`)
	// unready finds marks of work left for later; it is put together so that it
	// does not find itself.
	unready = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)
)

// checkFile says what is wrong with a Go file.
func checkFile(name, content string) []error {
	var wrong []error
	isGenerated := generated.MatchString(content)
	if first, _, _ := strings.Cut(content, "\n"); first != licence && !isGenerated {
		wrong = append(wrong, fmt.Errorf("%s: the first line is %q, want %q", name, first, licence))
	}
	if n := strings.Count(content, "\n"); n > maxLines && !isGenerated {
		wrong = append(wrong, fmt.Errorf("%s: %d lines, more than %d; split it by what its parts do", name, n, maxLines))
	}
	if strings.HasSuffix(name, "_test.go") && sleeping.MatchString(content) {
		wrong = append(wrong, fmt.Errorf("%s: a test that sleeps; wait on a condition, or use testing/synctest", name))
	}
	if !isGenerated {
		if at := unready.FindStringIndex(content); at != nil {
			line := 1 + strings.Count(content[:at[0]], "\n")
			wrong = append(wrong, fmt.Errorf("%s:%d: %s marks work that is not done", name, line, content[at[0]:at[1]]))
		}
	}
	return wrong
}

// checkDoc says what is wrong with the documentation of a package whose files, test
// files left out, have these package comments.
func checkDoc(name string, comments map[string]string) error {
	want := "Package " + name + " "
	if name == "main" {
		want = "Command "
	}
	for _, text := range comments {
		if strings.HasPrefix(text, want) {
			return nil
		}
	}
	if name != "main" {
		return fmt.Errorf("no file has a comment that begins %q", want)
	}
	return fmt.Errorf("no file has a comment that begins %q", want+"...")
}
