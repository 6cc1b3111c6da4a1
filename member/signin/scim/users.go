// SPDX-License-Identifier: Apache-2.0

package scim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/elimity-com/scim"
	scimerrors "github.com/elimity-com/scim/errors"
	"github.com/elimity-com/scim/optional"
	"github.com/elimity-com/scim/schema"
	filter "github.com/scim2/filter-parser/v2"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
)

// maxAttributes bounds a resource as it is stored, in bytes.
const maxAttributes = 256 << 10

// tries is how often a write is tried that met another.
const tries = 3

// users is the resource of users.
type users struct{ h *Handler }

// userOf reads a user out of its attributes; active holds where they do not say.
func userOf(attributes map[string]any, active bool) (u signin.User, err error) {
	delete(attributes, "password") // nobody signs in with one
	text := func(m map[string]any, k string) string { s, _ := m[k].(string); return s }
	bad := func(detail string) error {
		e := scimerrors.ScimErrorInvalidValue
		e.Detail = detail
		return e
	}
	u.Name, u.External, u.Active = text(attributes, "userName"), text(attributes, "externalId"), active
	if a, ok := attributes["active"].(bool); ok {
		u.Active = a
	}
	if u.Name == "" || len(u.Name) > 512 {
		return u, bad("userName has 1 to 512 bytes")
	}
	list, _ := attributes["emails"].([]any)
	var first, primary string
	work := map[signin.EmailKey]bool{}
	for _, e := range list {
		m, _ := e.(map[string]any)
		v := text(m, "value")
		key, err := signin.KeyOf(v)
		if err != nil {
			return u, bad(fmt.Sprintf("%.100q is no email", v))
		}
		if first == "" {
			first = v
		}
		if is, _ := m["primary"].(bool); is {
			if primary != "" && primary != v {
				return u, bad("two emails are primary")
			}
			primary = v
		}
		if strings.EqualFold(text(m, "type"), "work") {
			work[key] = true
		}
	}
	if _, err := signin.KeyOf(u.Name); primary == "" && err == nil {
		primary = u.Name
	}
	if primary == "" {
		primary = first
	}
	if u.Email, err = signin.NormalEmail(primary); err != nil {
		return u, bad("a user needs an email: a primary one, a userName that is one, or any")
	}
	own, err := signin.KeyOf(u.Email)
	if err != nil {
		return u, bad("the email cannot be read")
	}
	for k := range work {
		if k != own {
			u.Work = append(u.Work, k)
		}
	}
	if u.Attributes, err = json.Marshal(attributes); err != nil || len(u.Attributes) > maxAttributes {
		return u, bad(fmt.Sprintf("a resource has at most %d bytes", maxAttributes))
	}
	return u, nil
}

func userResource(u signin.User) (scim.Resource, map[string]any, error) {
	doc := map[string]any{}
	if err := json.Unmarshal(u.Attributes, &doc); err != nil {
		return scim.Resource{}, nil, fmt.Errorf("user %s cannot be read: %w", u.ID, err)
	}
	doc["active"] = u.Active
	r := scim.Resource{ID: u.ID, Attributes: doc, Meta: scim.Meta{Created: &u.Created, LastModified: &u.Changed, Version: fmt.Sprintf(`W/"%d"`, u.Version)}}
	if u.External != "" {
		r.ExternalID = optional.NewString(u.External)
	}
	return r, doc, nil
}

func (s users) answer(u signin.User, err error) (scim.Resource, error) {
	if err != nil {
		return scim.Resource{}, err
	}
	r, _, err := userResource(u)
	return r, err
}

// Create implements scim.ResourceHandler.
func (s users) Create(r *http.Request, attributes scim.ResourceAttributes) (scim.Resource, error) {
	u, err := userOf(attributes, true)
	if err == nil {
		u, err = s.h.cfg.Store.CreateUser(r.Context(), u)
	}
	return s.answer(u, told(r, err, ""))
}

// Get implements scim.ResourceHandler.
func (s users) Get(r *http.Request, id string) (scim.Resource, error) {
	u, err := s.h.cfg.Store.User(r.Context(), id)
	return s.answer(u, told(r, err, id))
}

// GetAll implements scim.ResourceHandler.
func (s users) GetAll(r *http.Request, p scim.ListRequestParams) (scim.Page, error) {
	if name, ok := equals(p, "userName"); ok {
		// What a provider asks before each write.
		u, err := s.h.cfg.Store.UserNamed(r.Context(), name)
		if errors.Is(err, cells.ErrNotFound) {
			return scim.Page{Resources: []scim.Resource{}}, nil
		}
		res, err := s.answer(u, told(r, err, ""))
		if err != nil {
			return scim.Page{}, err
		}
		var out pager
		out.add(p, res)
		return out.page(), nil
	}
	var out pager
	for after := ""; ; {
		list, err := s.h.cfg.Store.Users(r.Context(), after, 500)
		if err != nil {
			return scim.Page{}, told(r, err, "")
		}
		if len(list) == 0 {
			return out.page(), nil
		}
		for _, u := range list {
			res, doc, err := userResource(u)
			if err != nil {
				return scim.Page{}, told(r, err, u.ID)
			}
			if passes(p, u.ID, u.External, doc) {
				out.add(p, res)
			}
		}
		after = list[len(list)-1].ID
	}
}

// Replace implements scim.ResourceHandler.
func (s users) Replace(r *http.Request, id string, attributes scim.ResourceAttributes) (scim.Resource, error) {
	return s.change(r, id, func(map[string]any) (map[string]any, error) { return copied(attributes) })
}

// Patch implements scim.ResourceHandler.
func (s users) Patch(r *http.Request, id string, ops []scim.PatchOperation) (scim.Resource, error) {
	return s.change(r, id, func(doc map[string]any) (map[string]any, error) {
		if err := patch(s.h.user, doc, ops); err != nil {
			return nil, err
		}
		return valid(s.h.user, doc)
	})
}

// change writes what next makes of a user's attributes.
func (s users) change(r *http.Request, id string, next func(map[string]any) (map[string]any, error)) (scim.Resource, error) {
	var err error
	for range tries {
		var was, u signin.User
		if was, err = s.h.cfg.Store.User(r.Context(), id); err != nil {
			break
		}
		var doc map[string]any
		if _, doc, err = userResource(was); err != nil {
			break
		}
		if was.External != "" {
			doc[schema.CommonAttributeExternalID] = was.External
		}
		if doc, err = next(doc); err != nil {
			break
		}
		// A write that leaves active out brings nobody back.
		if u, err = userOf(doc, was.Active); err != nil {
			break
		}
		u.ID, u.Version = was.ID, was.Version
		if u, err = s.h.cfg.Store.UpdateUser(r.Context(), u); !errors.Is(err, signin.ErrChanged) {
			return s.answer(u, told(r, err, id))
		}
	}
	return scim.Resource{}, told(r, err, id)
}

// Delete implements scim.ResourceHandler.
func (s users) Delete(r *http.Request, id string) error {
	return told(r, s.h.cfg.Store.DeleteUser(r.Context(), id), id)
}

// valid is a resource as its schema allows it.
func valid(s schema.Schema, doc map[string]any) (map[string]any, error) {
	external, _ := doc[schema.CommonAttributeExternalID].(string)
	delete(doc, "id")
	delete(doc, "meta")
	doc["schemas"] = []any{s.ID}
	out, bad := s.Validate(doc)
	if bad != nil {
		return nil, *bad
	}
	delete(out, "schemas")
	if external != "" {
		out[schema.CommonAttributeExternalID] = external
	}
	return out, nil
}

func copied(m map[string]any) (out map[string]any, err error) {
	b, err := json.Marshal(m)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	return out, err
}

// equals is the value of a filter that is one comparison of one attribute.
func equals(p scim.ListRequestParams, name string) (string, bool) {
	if p.FilterValidator == nil {
		return "", false
	}
	e, ok := p.FilterValidator.GetFilter().(*filter.AttributeExpression)
	if !ok || e.Operator != filter.EQ || e.AttributePath.SubAttribute != nil || !strings.EqualFold(e.AttributePath.AttributeName, name) {
		return "", false
	}
	v, ok := e.CompareValue.(string)
	return v, ok
}

func passes(p scim.ListRequestParams, id, external string, doc map[string]any) bool {
	if p.FilterValidator == nil {
		return true
	}
	with := map[string]any{"id": id}
	if external != "" {
		with[schema.CommonAttributeExternalID] = external
	}
	for k, v := range doc {
		with[k] = v
	}
	return p.FilterValidator.PassesFilter(with) == nil
}

// pager keeps the resources of the page that was asked for, and counts the others.
type pager struct {
	n    int
	list []scim.Resource
}

func (g *pager) add(p scim.ListRequestParams, r scim.Resource) {
	if g.n++; g.n >= p.StartIndex && len(g.list) < p.Count {
		g.list = append(g.list, r)
	}
}

func (g *pager) page() scim.Page {
	if g.list == nil {
		g.list = []scim.Resource{} // an empty list, not null
	}
	return scim.Page{TotalResults: g.n, Resources: g.list}
}

type failureKey struct{}

// told translates an error of the store. One that says nothing of the request ends it
// with 503.
func told(r *http.Request, err error, id string) error {
	var protocol scimerrors.ScimError
	switch {
	case err == nil, errors.As(err, &protocol):
		return err
	case errors.Is(err, cells.ErrNotFound):
		return scimerrors.ScimErrorResourceNotFound(id)
	case errors.Is(err, signin.ErrTaken):
		return scimerrors.ScimErrorUniqueness
	case errors.Is(err, cells.ErrInvalid):
		return scimerrors.ScimErrorInvalidValue
	}
	if f, ok := r.Context().Value(failureKey{}).(*error); ok {
		*f = err
	}
	return err
}

func withFailure(ctx context.Context, f *error) context.Context {
	return context.WithValue(ctx, failureKey{}, f)
}
