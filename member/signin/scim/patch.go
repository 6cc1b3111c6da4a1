// SPDX-License-Identifier: Apache-2.0

package scim

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	"github.com/elimity-com/scim"
	scimerrors "github.com/elimity-com/scim/errors"
	"github.com/elimity-com/scim/schema"
	filter "github.com/scim2/filter-parser/v2"
)

// patch applies operations, which the protocol has checked against the schema, to a
// resource's attributes.
func patch(s schema.Schema, doc map[string]any, ops []scim.PatchOperation) error {
	if len(ops) > maxOperations {
		return scimerrors.ScimErrorInvalidValue
	}
	for _, op := range ops {
		value, err := plain(op.Value)
		if err != nil {
			return scimerrors.ScimErrorInvalidValue
		}
		if op.Path == nil {
			m, ok := value.(map[string]any)
			if !ok {
				return scimerrors.ScimErrorInvalidValue
			}
			list, err := named(s, m)
			if err != nil {
				return err
			}
			for _, n := range list {
				if err := setAttribute(s, doc, op.Op, n.path, n.value); err != nil {
					return err
				}
			}
			continue
		}
		if err := setAttribute(s, doc, op.Op, *op.Path, value); err != nil {
			return err
		}
	}
	return nil
}

// plain is a value as JSON has it: no types of the library's.
func plain(v any) (out any, err error) {
	b, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	return out, err
}

// nameOf is an attribute's name as the schema spells it.
func nameOf(s schema.Schema, name string) (string, bool) {
	if strings.EqualFold(name, schema.CommonAttributeExternalID) {
		return schema.CommonAttributeExternalID, false
	}
	if a, ok := s.Attributes.ContainsAttribute(name); ok {
		return a.Name(), a.MultiValued()
	}
	return name, false
}

func setAttribute(s schema.Schema, doc map[string]any, op string, path filter.Path, value any) error {
	name, multi := nameOf(s, path.AttributePath.AttributeName)
	sub := path.AttributePath.SubAttributeName()
	if path.SubAttribute != nil {
		sub = *path.SubAttribute
	}
	switch {
	case path.ValueExpression != nil && !multi:
		return scimerrors.ScimErrorInvalidPath
	case path.ValueExpression != nil:
		return setElements(doc, name, op, path.ValueExpression, sub, value)
	case sub != "" && multi:
		return setElements(doc, name, op, nil, sub, value)
	case sub != "":
		m, _ := doc[name].(map[string]any)
		if m == nil {
			m = map[string]any{}
		}
		set(m, sub, op, value)
		doc[name] = m
	case multi && op == scim.PatchOperationAdd:
		list, _ := doc[name].([]any)
		more, isList := value.([]any)
		if !isList {
			more = []any{value}
		}
		doc[name] = appendNew(list, more)
	case multi && op == scim.PatchOperationRemove && value != nil:
		// Providers name what they remove in the value.
		gone, isList := value.([]any)
		if !isList {
			gone = []any{value}
		}
		list, _ := doc[name].([]any)
		doc[name] = without(list, func(e any) bool {
			for _, g := range gone {
				if sameValue(e, g) {
					return true
				}
			}
			return false
		})
	case multi && op == scim.PatchOperationReplace:
		if _, isList := value.([]any); !isList && value != nil {
			value = []any{value}
		}
		set(doc, name, op, value)
	default:
		set(doc, name, op, value)
	}
	return nil
}

func set(m map[string]any, name, op string, value any) {
	for k := range m {
		if strings.EqualFold(k, name) {
			name = k
		}
	}
	if op == scim.PatchOperationRemove || value == nil {
		delete(m, name)
		return
	}
	m[name] = value
}

// sameValue compares elements by their value, and as a whole where they have none.
func sameValue(a, b any) bool {
	x, isMap := a.(map[string]any)
	y, both := b.(map[string]any)
	if isMap && both && x["value"] != nil && y["value"] != nil {
		return reflect.DeepEqual(x["value"], y["value"])
	}
	return reflect.DeepEqual(a, b)
}

func appendNew(list, more []any) []any {
	for _, m := range more {
		list = append(without(list, func(e any) bool { return sameValue(e, m) }), m)
	}
	return list
}

func without(list []any, gone func(any) bool) (out []any) {
	for _, e := range list {
		if !gone(e) {
			out = append(out, e)
		}
	}
	return out
}

// setElements changes the elements of a multi-valued attribute that a filter selects;
// a nil filter selects all.
func setElements(doc map[string]any, name, op string, where filter.Expression, sub string, value any) error {
	list, _ := doc[name].([]any)
	found := false
	var out []any
	for _, e := range list {
		m, ok := e.(map[string]any)
		if !ok {
			return scimerrors.ScimErrorInvalidPath
		}
		hit := true
		if where != nil {
			var err error
			if hit, err = selects(where, m); err != nil {
				return err
			}
		}
		found = found || hit
		switch {
		case !hit:
		case sub != "":
			set(m, sub, op, value)
		case op == scim.PatchOperationRemove:
			continue
		default:
			next, ok := value.(map[string]any)
			if !ok {
				return scimerrors.ScimErrorInvalidValue
			}
			for k, v := range next {
				set(m, k, op, v)
			}
		}
		out = append(out, e)
	}
	if !found {
		// Providers add the first work email by a path that selects it.
		eq, ok := where.(*filter.AttributeExpression)
		if op == scim.PatchOperationRemove || !ok || eq.Operator != filter.EQ || sub == "" && !isMap(value) {
			return scimerrors.ScimErrorNoTarget
		}
		m := map[string]any{eq.AttributePath.AttributeName: eq.CompareValue}
		if sub != "" {
			m[sub] = value
		} else {
			for k, v := range value.(map[string]any) {
				set(m, k, op, v)
			}
		}
		out = append(out, m)
	}
	doc[name] = out
	return nil
}

func isMap(v any) bool { _, ok := v.(map[string]any); return ok }

// selects evaluates the filter of a value path on one element. Text is compared without
// case, as the sub-attributes of users and groups are.
func selects(e filter.Expression, m map[string]any) (bool, error) {
	switch e := e.(type) {
	case *filter.LogicalExpression:
		l, err := selects(e.Left, m)
		if err != nil || l == (e.Operator == filter.OR) {
			return l, err
		}
		return selects(e.Right, m)
	case *filter.NotExpression:
		v, err := selects(e.Expression, m)
		return !v, err
	case *filter.AttributeExpression:
		var have any
		for k, v := range m {
			if strings.EqualFold(k, e.AttributePath.AttributeName) {
				have = v
			}
		}
		return compares(have, e.Operator, e.CompareValue)
	}
	return false, scimerrors.ScimErrorInvalidFilter
}

func compares(have any, op filter.CompareOperator, want any) (bool, error) {
	h, w := strings.ToLower(fmt.Sprint(have)), strings.ToLower(fmt.Sprint(want))
	switch op {
	case filter.PR:
		return have != nil, nil
	case filter.EQ:
		return have != nil && h == w, nil
	case filter.NE:
		return have == nil || h != w, nil
	case filter.CO:
		return have != nil && strings.Contains(h, w), nil
	case filter.SW:
		return have != nil && strings.HasPrefix(h, w), nil
	case filter.EW:
		return have != nil && strings.HasSuffix(h, w), nil
	}
	return false, scimerrors.ScimErrorInvalidFilter
}
