// SPDX-License-Identifier: Apache-2.0

package kube

import (
	_ "embed"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/cloister-dev/cloister/cells"
)

const (
	// Group, Version, Kind and Resource name the custom resource.
	Group    = "cloister.dev"
	Version  = "v1alpha1"
	Kind     = "TenantRoute"
	Resource = "tenantroutes"

	// Finalizer keeps an object that has a row.
	Finalizer = "cloister.dev/route"

	// MaxName is the longest name that the API server takes.
	MaxName = 253
)

// GVR is the resource in client-go's terms.
var GVR = schema.GroupVersionResource{Group: Group, Version: Version, Resource: Resource}

//go:embed crd.yaml
var crd []byte

// CRD returns the custom resource definition, as YAML. The caller owns it.
func CRD() []byte { return append([]byte(nil), crd...) }

// escapes are the codes of the bytes of a tenant's id. They begin no other code and
// are in the bytes' order, so names differ when ids do and sort as ids do; they are
// of letters and digits only, so every name is one that the API server takes.
//
//	a-z 1-8     themselves
//	- . 0       00 01 02
//	9 : @       90 91 92
//	A-G         93 to 99
//	H-Z         9a to 9s
//	_           9t
var escapes = func() (codes [256]string) {
	for c := byte('a'); c <= 'z'; c++ {
		codes[c] = string(c)
	}
	for c := byte('1'); c <= '8'; c++ {
		codes[c] = string(c)
	}
	codes['-'], codes['.'], codes['0'] = "00", "01", "02"
	codes['9'], codes[':'], codes['@'], codes['_'] = "90", "91", "92", "9t"
	for i, digit := range "3456789abcdefghijklmnopqrs" {
		codes['A'+i] = "9" + string(digit)
	}
	return codes
}()

// Name returns the name of the tenant's object: the id with each byte but a-z and
// 1-8 written as two. The error wraps [cells.ErrInvalid]: a malformed id, or one
// whose name is longer than [MaxName], which takes an id of 127 bytes or more of
// which nearly none is a-z or 1-8.
func Name(t cells.TenantID) (string, error) {
	if err := t.Validate(); err != nil {
		return "", err
	}
	var b strings.Builder
	for i := range len(t) {
		b.WriteString(escapes[t[i]])
	}
	if b.Len() > MaxName {
		return "", fmt.Errorf("%w: tenant id makes a name of %d bytes, Kubernetes takes %d", cells.ErrInvalid, b.Len(), MaxName)
	}
	return b.String(), nil
}
