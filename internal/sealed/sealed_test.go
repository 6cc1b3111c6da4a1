// SPDX-License-Identifier: Apache-2.0

package sealed_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/cloister-dev/cloister/internal/sealed"
)

var (
	key    = []byte("0123456789abcdef")
	format = sealed.Format{Name: "test-file", Version: 1, Label: "test 1"}
)

type doc struct {
	Text string `json:"text"`
}

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	var got doc
	if err := format.Read(path, key, &got); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, text := range []string{"one", "two\nlines", "mac 00\n"} {
		if err := format.Write(path, key, doc{text}); err != nil {
			t.Fatal(err)
		}
		if err := format.Read(path, key, &got); err != nil || got.Text != text {
			t.Fatalf("%+v %v", got, err)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Fatal(st.Mode(), err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other := format
	other.Label = "test 2"
	relabelled, err := other.Encode(key, doc{"x"})
	if err != nil {
		t.Fatal(err)
	}
	renamed, err := sealed.Format{Name: "other-file", Version: 1, Label: "test 1"}.Encode(key, doc{"x"})
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string][]byte{
		"torn": good[:len(good)-10], "empty": {}, "changed": bytes.Replace(good, []byte("mac 00"), []byte("mac 01"), 1), "grown": append(bytes.Clone(good), 'x'),
		"newer": bytes.Replace(good, []byte("file 1"), []byte("file 2"), 1), "no body": []byte("test-file 1\nmac 00\n"), "no line": []byte("test-file 1\n"),
		"twice": append(bytes.Clone(good), good...), "another label": relabelled, "another kind": renamed, "upper case": bytes.ToUpper(good),
	} {
		got = doc{}
		if err := format.Decode(bad, key, &got); !errors.Is(err, sealed.ErrUntrusted) || got.Text != "" {
			t.Errorf("%s: %+v %v", name, got, err)
		}
	}
	if err := format.Decode(good, []byte("fedcba9876543210"), &got); !errors.Is(err, sealed.ErrUntrusted) {
		t.Error("another key:", err)
	}
	if _, err := format.Encode(key[:15], doc{}); err == nil {
		t.Error("a short key was taken")
	}
	// What cannot be written leaves what was there, and nothing beside it.
	if err := format.Write(path, key, func() {}); err == nil {
		t.Error("a function was written")
	}
	if err := format.Write(filepath.Join(path, "below"), key, doc{}); err == nil {
		t.Error("a file below a file was written")
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("left over: %v %v", left, err)
	}
	if err := format.Read(path, key, &got); err != nil {
		t.Error(err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("test-file 1\n{}\nmac 00\n"))
	good, err := format.Encode(key, doc{"x"})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good[:len(good)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		var d doc
		if err := format.Decode(b, key, &d); err == nil && !bytes.Equal(b, good) {
			t.Fatalf("%q was taken for %+v", b, d)
		}
	})
}
