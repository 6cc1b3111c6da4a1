// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// goPackage is the part of "go list -json" that the rules need.
type goPackage struct {
	ImportPath, Name, Dir string
	Standard              bool
	Module                *struct{ Path string }
	Imports               []string
	TestImports           []string
	XTestImports          []string
	Error                 *struct{ Err string }
}

// root is the folder of the main module.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "go.mod")); err != nil || !bytes.HasPrefix(b, []byte("module "+module+"\n")) {
		t.Fatalf("%s is not the main module: %v", dir, err)
	}
	return dir
}

// golist runs "go list -json" in a folder.
func golist(t *testing.T, dir string, args ...string) []goPackage {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-json"}, args...)...)
	cmd.Dir = dir
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list in %s: %v\n%s", dir, err, errs.Bytes())
	}
	var pkgs []goPackage
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if p.Error != nil {
			t.Fatalf("%s: %s", p.ImportPath, p.Error.Err)
		}
		pkgs = append(pkgs, p)
	}
	if len(pkgs) == 0 {
		t.Fatalf("go list in %s found nothing", dir)
	}
	return pkgs
}

// modules are the folders of the repository's modules.
func modules(t *testing.T) []string {
	dirs := []string{root(t)}
	for _, nested := range []string{"services", "table/realtest", "member/stores/realtest"} {
		dir := filepath.Join(dirs[0], nested)
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, dir)
	}
	return dirs
}

func TestImportsPointDown(t *testing.T) {
	for _, dir := range modules(t) {
		for _, p := range golist(t, dir, "./...") {
			for _, imports := range []struct {
				list   []string
				inTest bool
			}{{p.Imports, false}, {p.TestImports, true}, {p.XTestImports, true}} {
				for _, to := range imports.list {
					if err := checkImport(p.ImportPath, to, imports.inTest); err != nil {
						t.Error(err)
					}
				}
			}
		}
	}
}

func TestCellsIsLight(t *testing.T) {
	pkgs := golist(t, root(t), "-deps", "./cells")
	for _, p := range pkgs {
		mod := ""
		if !p.Standard {
			if p.Module == nil {
				t.Fatalf("%s belongs to no module", p.ImportPath)
			}
			mod = p.Module.Path
		}
		if err := checkCellsDep(p.ImportPath, mod); err != nil {
			t.Error(err)
		}
	}
	if len(pkgs) < 100 {
		t.Errorf("only %d dependencies were looked at", len(pkgs))
	}
}

func TestPackagesAreDocumented(t *testing.T) {
	for _, dir := range modules(t) {
		for _, p := range golist(t, dir, "./...") {
			files, err := filepath.Glob(filepath.Join(p.Dir, "*.go"))
			if err != nil {
				t.Fatal(err)
			}
			comments, onlyTests := map[string]string{}, true
			for _, f := range files {
				if strings.HasSuffix(f, "_test.go") {
					continue
				}
				onlyTests = false
				parsed, err := parser.ParseFile(token.NewFileSet(), f, nil, parser.ParseComments|parser.PackageClauseOnly)
				if err != nil {
					t.Fatal(err)
				}
				comments[f] = docOf(parsed)
			}
			if onlyTests {
				continue
			}
			if err := checkDoc(p.Name, comments); err != nil {
				t.Errorf("%s: %v", p.ImportPath, err)
			}
		}
	}
}

func docOf(f *ast.File) string { return f.Doc.Text() }

func TestFiles(t *testing.T) {
	top := root(t)
	n := 0
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != top && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin" || name == "node_modules") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // an editor's file that has come and gone
		}
		if err != nil {
			return err
		}
		n++
		name, err := filepath.Rel(top, path)
		if err != nil {
			return err
		}
		for _, wrong := range checkFile(name, string(b)) {
			t.Error(wrong)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n < 20 {
		t.Errorf("only %d files were looked at", n)
	}
}
