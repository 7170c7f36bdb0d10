package main

import (
	"bytes"
	"context"
	"os"

	v1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
)

// policyField is where a refusal of the policy is said to be.
const policyField = "policy"

// policy is a ValidatingAdmissionPolicy as the API server compiles it.
type policy struct {
	validator validating.Validator
	kind      schema.GroupVersionKind
	resource  schema.GroupVersionResource
}

// newPolicy reads the first document of a file, as strictly as kubectl asks the API server to.
func newPolicy(path string, kind schema.GroupVersionKind, resource schema.GroupVersionResource) (*policy, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	if err := v1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	first, _, _ := bytes.Cut(text, []byte("\n---\n"))
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	var read v1.ValidatingAdmissionPolicy
	if _, _, err := decoder.Decode(first, nil, &read); err != nil {
		return nil, err
	}
	validator, err := compile(&read)
	return &policy{validator, kind, resource}, err
}

// compile does what the API server's plugin does, which keeps it to itself.
func compile(read *v1.ValidatingAdmissionPolicy) (validating.Validator, error) {
	compiler, err := cel.NewCompositedCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	if err != nil {
		return nil, err
	}
	declared := cel.OptionalVariableDeclarations{HasAuthorizer: true}
	variables := make([]cel.NamedExpressionAccessor, len(read.Spec.Variables))
	for i, each := range read.Spec.Variables {
		variables[i] = &validating.Variable{Name: each.Name, Expression: each.Expression}
	}
	compiler.CompileAndStoreVariables(variables, declared, environment.StoredExpressions)
	conditions := make([]cel.ExpressionAccessor, len(read.Spec.MatchConditions))
	for i := range read.Spec.MatchConditions {
		conditions[i] = (*matchconditions.MatchCondition)(&read.Spec.MatchConditions[i])
	}
	validations, messages := []cel.ExpressionAccessor{}, []cel.ExpressionAccessor{}
	for _, each := range read.Spec.Validations {
		validations = append(validations, &validating.ValidationCondition{Expression: each.Expression, Message: each.Message, Reason: each.Reason})
		messages = append(messages, &validating.MessageExpressionCondition{MessageExpression: each.MessageExpression})
	}
	matcher := matchconditions.NewMatcher(
		compiler.CompileCondition(conditions, declared, environment.StoredExpressions), read.Spec.FailurePolicy, "policy", "validate", read.Name,
	)
	return validating.NewValidator(
		compiler.CompileCondition(validations, declared, environment.StoredExpressions),
		matcher,
		compiler.CompileCondition(nil, declared, environment.StoredExpressions),
		compiler.CompileCondition(messages, cel.OptionalVariableDeclarations{}, environment.StoredExpressions),
		read.Spec.FailurePolicy,
		nil,
	), nil
}

// refusals are the decisions that deny, of which the API server tells the first.
func (p *policy) refusals(ctx context.Context, object, old *unstructured.Unstructured) field.ErrorList {
	operation, before := admission.Create, runtime.Object(nil)
	if old != nil {
		operation, before = admission.Update, old
	}
	attributes := admission.NewAttributesRecord(
		object, before, p.kind, object.GetNamespace(), object.GetName(), p.resource, "", operation, nil, false, nil,
	)
	versioned := &admission.VersionedAttributes{
		Attributes: attributes, VersionedObject: object, VersionedOldObject: before, VersionedKind: p.kind,
	}
	result := p.validator.Validate(ctx, p.resource, versioned, nil, nil, celconfig.RuntimeCELCostBudget, nil)
	found := field.ErrorList{}
	for _, decision := range result.Decisions {
		if decision.Action == validating.ActionDeny {
			found = append(found, &field.Error{Type: field.ErrorType(decision.Reason), Field: policyField, Detail: decision.Message})
		}
	}
	return found
}
