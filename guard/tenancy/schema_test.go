// SPDX-License-Identifier: Apache-2.0

package tenancy

import "testing"

// Each version's fields are those of the one before and more; a build has one that
// there is.
func TestSchemas(t *testing.T) {
	if SchemaVersion() != NewestSchema {
		t.Fatalf("this build has version %d", SchemaVersion())
	}
	f, err := full().Fingerprint()
	if err != nil {
		t.Fatal(err)
	}
	newest := 0
	for name, v := range since {
		newest = max(newest, v)
		if _, ok := f.Fields[name]; !ok || v < 2 || v > NewestSchema || knows(v-1, name) || !knows(v, name) {
			t.Errorf("field %s of version %d", name, v)
		}
	}
	if newest != 2 {
		t.Errorf("the newest field is of version %d", newest)
	}
	for _, text := range []string{"", "0", "-1", "4", "two"} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("a build has version %q", text)
				}
			}()
			parseSchema(text)
		}()
	}
	// What an older build makes of the same configuration, and who matches whom.
	defer func(v int) { built = v }(built)
	built = 1
	old, err := full().Fingerprint()
	if err != nil || old.Schema != 1 || old.Fields[FieldAudiences] != nil {
		t.Fatalf("%+v, %v", old, err)
	}
	plain := full()
	plain.Audiences = nil
	built = 2
	bare, err := plain.Fingerprint()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what           string
		process, value Fingerprint
		want           bool
	}{
		{"the older build, under the newer's value", old, f, true},
		{"the newer build, under the older's value, with an audience", f, old, false},
		{"the newer build, under the older's value, without one", bare, old, true},
	} {
		if got := c.process.Matches(c.value); got != c.want {
			t.Errorf("%s: %t", c.what, got)
		}
	}
}
