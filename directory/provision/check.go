// SPDX-License-Identifier: Apache-2.0

package provision

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// Bounds of specs.
const (
	// MaxReplicas bounds the processes of a cell.
	MaxReplicas = 64
	// MaxCommand bounds the words of a command, MaxEnv the variables of a spec, and
	// MaxValue each of them, in bytes.
	MaxCommand = 64
	MaxEnv     = 64
	MaxValue   = 4096
	// MaxMessage bounds the message of a status, in bytes.
	MaxMessage = 1024
)

// VersionLabel is the longest name of a version, in bytes.
const VersionLabel = 63

var (
	versionName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	envName     = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
	secretName  = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)
	secretKey   = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}$`)
	quantity    = regexp.MustCompile(`^[1-9][0-9]{0,11}(Mi|Gi|Ti|M|G|T)?$`)
	imageName   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}$`)
)

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", cells.ErrInvalid, fmt.Sprintf(format, args...))
}

// CheckVersionName reports whether a name can be a version's, and a label of
// Kubernetes. The error wraps [cells.ErrInvalid].
func CheckVersionName(name string) error {
	if !versionName.MatchString(name) {
		return bad("version %q; want 1 to %d bytes of [A-Za-z0-9._-], a letter or digit first and last", name, VersionLabel)
	}
	return nil
}

// Validate reports what is malformed; the error wraps [cells.ErrInvalid].
func (v *Version) Validate() error {
	if err := CheckVersionName(v.Name); err != nil {
		return err
	}
	if v.Image == "" && len(v.Command) == 0 {
		return bad("version %s has neither an image nor a command", v.Name)
	}
	return checkProgram(v.Image, v.Command)
}

func checkProgram(image string, command []string) error {
	if image != "" && !imageName.MatchString(image) {
		return bad("image %q is no reference of an image", image)
	}
	if len(command) > MaxCommand {
		return bad("a command has at most %d words", MaxCommand)
	}
	for i, w := range command {
		if len(w) > MaxValue || strings.ContainsRune(w, 0) || i == 0 && w == "" {
			return bad("word %d of the command is empty, has more than %d bytes, or a zero byte", i, MaxValue)
		}
	}
	return nil
}

// Validate reports what is malformed; the error wraps [cells.ErrInvalid].
func (r SecretRef) Validate() error {
	if !secretName.MatchString(r.Name) || !secretKey.MatchString(r.Key) || strings.Contains(r.Name, "..") {
		return bad("secret %q, key %q; want a name of [a-z0-9.-] and a key of [A-Za-z0-9._-]", r.Name, r.Key)
	}
	return nil
}

// Reserved reports whether the platform sets a variable itself: a spec may not.
func Reserved(name string) bool {
	return strings.HasPrefix(name, "CELL_") || name == "PGPASSFILE"
}

// Validate reports what is malformed; the error wraps [cells.ErrInvalid].
func (s *Spec) Validate() error {
	if err := s.Cell.Validate(); err != nil {
		return err
	}
	if err := CheckVersionName(s.Version); err != nil {
		return err
	}
	if err := checkProgram(s.Image, s.Command); err != nil {
		return err
	}
	if s.Replicas < 1 || s.Replicas > MaxReplicas {
		return bad("replicas is %d; want 1 to %d", s.Replicas, MaxReplicas)
	}
	switch s.Store.Engine {
	case "", EngineNone, EngineSQLite, EnginePostgres:
	default:
		return bad("store engine %q; want none, sqlite or postgres", s.Store.Engine)
	}
	if s.Store.Size != "" && !quantity.MatchString(s.Store.Size) {
		return bad("store size %q; want a quantity like 10Gi", s.Store.Size)
	}
	if !s.Store.DSN.IsZero() {
		if err := s.Store.DSN.Validate(); err != nil {
			return err
		}
		if s.Store.Engine != EnginePostgres {
			return bad("a connection string goes with the engine postgres")
		}
	}
	if len(s.Env)+len(s.Secrets) > MaxEnv {
		return bad("a spec has at most %d variables", MaxEnv)
	}
	for name, v := range s.Env {
		if err := checkVariable(name); err != nil {
			return err
		}
		if len(v) > MaxValue || strings.ContainsRune(v, 0) {
			return bad("variable %s has more than %d bytes, or a zero byte", name, MaxValue)
		}
		if _, twice := s.Secrets[name]; twice {
			return bad("variable %s is set twice, in clear and by reference", name)
		}
	}
	for name, ref := range s.Secrets {
		if err := checkVariable(name); err != nil {
			return err
		}
		if err := ref.Validate(); err != nil {
			return fmt.Errorf("variable %s: %w", name, err)
		}
	}
	for name, v := range map[string]string{"jurisdiction": s.Jurisdiction, "geography": s.Geography} {
		if len(v) > 128 || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return bad("%s has more than 128 bytes, or a control character", name)
		}
	}
	if !s.Desired.Valid() {
		return bad("desired %q; want serving, drained or retired", s.Desired)
	}
	return nil
}

func checkVariable(name string) error {
	if !envName.MatchString(name) {
		return bad("%q is no name of a variable", name)
	}
	if Reserved(name) {
		return bad("variable %s is set by the platform", name)
	}
	return nil
}

// Expand replaces the {words} of a command or a variable. A word that is not known
// is refused, so that a typing error does not reach the service.
func Expand(s string, words map[string]string) (string, error) {
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(s, "{")
		b.WriteString(before)
		if !found {
			return b.String(), nil
		}
		word, after, closed := strings.Cut(rest, "}")
		if !closed {
			return "", bad("a { without its }")
		}
		v, ok := words[word]
		if !ok {
			return "", bad("unknown word {%s}", word)
		}
		b.WriteString(v)
		s = after
	}
}
