// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"unicode/utf8"

	"github.com/cloister-dev/cloister/cells"
)

// Settings are a process's run-time settings by name, in words that anybody may read:
// they are shown to operators. A secret, and an address that may carry one, has no
// place in them; whether one is set does.
type Settings map[string]string

// Bounds of [Settings].
const (
	MaxSettings     = 64  // names
	MaxSettingValue = 256 // bytes
)

var settingName = regexp.MustCompile(`^[a-z][a-z0-9._-]{0,63}$`)

// Validate refuses more than [MaxSettings], names other than lower-case words, and
// values that are long or not printable. Errors wrap [cells.ErrInvalid].
func (s Settings) Validate() error {
	if len(s) > MaxSettings {
		return fmt.Errorf("%w: tenancy: %d settings, at most %d", cells.ErrInvalid, len(s), MaxSettings)
	}
	for name, v := range s {
		if !settingName.MatchString(name) {
			return fmt.Errorf("%w: tenancy: setting %q is no name", cells.ErrInvalid, name)
		}
		if len(v) > MaxSettingValue || !utf8.ValidString(v) || slices.ContainsFunc([]rune(v), func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return fmt.Errorf("%w: tenancy: the value of setting %s is longer than %d bytes, or not printable", cells.ErrInvalid, name, MaxSettingValue)
		}
	}
	return nil
}

// Names returns the names that any of the settings has, sorted.
func Names(all ...Settings) []string {
	names := map[string]bool{}
	for _, s := range all {
		for name := range s {
			names[name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}
