// SPDX-License-Identifier: Apache-2.0

package channel

import (
	"crypto/x509"
	"encoding/asn1"
	"fmt"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// Role is what a process is in its fleet.
type Role string

// The roles. There are no others.
const (
	// RoleCell: a process of the cell that Name says.
	RoleCell Role = "cell"
	// RoleEdge: a router in front of the cells.
	RoleEdge Role = "edge"
	// RoleDirectory: the control plane. Only it orders fences and moves.
	RoleDirectory Role = "directory"
	// RoleOperator: a person's command line.
	RoleOperator Role = "operator"
	// RoleProvisioner: what makes the cells of a machine or cluster as the directory
	// wants them. It reads their specs, and reaches no cell and no route.
	RoleProvisioner Role = "provisioner"
)

// Valid reports whether the role is one of the closed list.
func (r Role) Valid() bool {
	switch r {
	case RoleCell, RoleEdge, RoleDirectory, RoleOperator, RoleProvisioner:
		return true
	}
	return false
}

// Identity names one peer of a fleet. Fleet and Name match [a-z0-9-]{1,32}.
type Identity struct {
	Fleet string `json:"fleet"`
	Role  Role   `json:"role"`
	Name  string `json:"name"`
}

const scheme = "cell://"

// String returns the URI cell://<fleet>/<role>/<name>.
func (id Identity) String() string {
	return scheme + id.Fleet + "/" + string(id.Role) + "/" + id.Name
}

// Validate reports whether the identity is well formed. The error wraps
// [cells.ErrInvalid].
func (id Identity) Validate() error {
	if err := validLabel(id.Fleet); err != nil {
		return fmt.Errorf("fleet: %w", err)
	}
	if !id.Role.Valid() {
		return fmt.Errorf("%w: role %q; it is cell, edge, directory, operator or provisioner", cells.ErrInvalid, id.Role)
	}
	if err := validLabel(id.Name); err != nil {
		return fmt.Errorf("name: %w", err)
	}
	return nil
}

func validLabel(s string) error {
	if err := cells.CellID(s).Validate(); err != nil {
		return fmt.Errorf("%w: %q does not match [a-z0-9-]{1,32}", cells.ErrInvalid, s)
	}
	return nil
}

// ParseIdentity reads cell://<fleet>/<role>/<name>. It accepts exactly what
// [Identity.String] writes for a valid identity, byte for byte, and nothing
// else. The error wraps [cells.ErrInvalid].
func ParseIdentity(s string) (Identity, error) {
	const longest = len(scheme) + 32 + 1 + len(RoleProvisioner) + 1 + 32
	if len(s) > longest {
		return Identity{}, fmt.Errorf("%w: identity has %d bytes, at most %d", cells.ErrInvalid, len(s), longest)
	}
	rest, ok := strings.CutPrefix(s, scheme)
	if !ok {
		return Identity{}, fmt.Errorf("%w: identity %q does not start with %s", cells.ErrInvalid, s, scheme)
	}
	parts := strings.Split(rest, "/")
	if len(parts) != 3 {
		return Identity{}, fmt.Errorf("%w: identity %q is not cell://<fleet>/<role>/<name>", cells.ErrInvalid, s)
	}
	id := Identity{Fleet: parts[0], Role: Role(parts[1]), Name: parts[2]}
	if err := id.Validate(); err != nil {
		return Identity{}, fmt.Errorf("identity %q: %w", s, err)
	}
	return id, nil
}

var oidSAN = asn1.ObjectIdentifier{2, 5, 29, 17}

// IdentityOf reads the identity that a certificate names, without judging
// whether the certificate is to be believed. The error wraps [cells.ErrInvalid].
func IdentityOf(cert *x509.Certificate) (Identity, error) {
	var san []byte
	found := 0
	for _, e := range cert.Extensions {
		if e.Id.Equal(oidSAN) {
			san = e.Value
			found++
		}
	}
	if found != 1 {
		return Identity{}, fmt.Errorf("%w: certificate has %d subject alternative name extensions, want 1", cells.ErrInvalid, found)
	}
	uri, err := parseSAN(san)
	if err != nil {
		return Identity{}, err
	}
	return ParseIdentity(uri)
}

// tagURI is uniformResourceIdentifier in GeneralName (RFC 5280, 4.2.1.6).
const tagURI = 6

// parseSAN returns the only name in a subjectAltName extension, which must be a
// URI. It reads the raw names because the parsed certificate keeps no trace of
// kinds that the standard library does not know.
func parseSAN(der []byte) (string, error) {
	var seq asn1.RawValue
	rest, err := asn1.Unmarshal(der, &seq)
	if err != nil || len(rest) != 0 || seq.Class != asn1.ClassUniversal || seq.Tag != asn1.TagSequence || !seq.IsCompound {
		return "", fmt.Errorf("%w: malformed subject alternative name", cells.ErrInvalid)
	}
	var names []asn1.RawValue
	for rest = seq.Bytes; len(rest) > 0; {
		var v asn1.RawValue
		if rest, err = asn1.Unmarshal(rest, &v); err != nil {
			return "", fmt.Errorf("%w: malformed subject alternative name", cells.ErrInvalid)
		}
		if names = append(names, v); len(names) > 1 {
			return "", fmt.Errorf("%w: certificate has more than one subject alternative name, want one URI", cells.ErrInvalid)
		}
	}
	if len(names) == 0 {
		return "", fmt.Errorf("%w: certificate has no subject alternative name, want one URI", cells.ErrInvalid)
	}
	if v := names[0]; v.Class != asn1.ClassContextSpecific || v.Tag != tagURI || v.IsCompound {
		return "", fmt.Errorf("%w: the subject alternative name is no URI", cells.ErrInvalid)
	}
	return string(names[0].Bytes), nil
}
